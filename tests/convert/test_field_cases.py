# SPDX-License-Identifier: Apache-2.0
"""What checkpoints in the field do otherwise: no causal mask, a head inside the language model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import alone, padded, rows, tiny, word_tokenizer

import headswap
from headswap.heads import release
from headswap.text import Classifier

SEQ = "AutoModelForSequenceClassification"


def edit(folder: Path, name: str = "config.json", **fields: Any) -> None:
    file = folder / name
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **fields}), "utf-8")


def test_a_decoder_without_a_causal_mask_is_honoured_or_refused(tmp_path: Path) -> None:
    tiny("llama", SEQ, num_labels=3).save_pretrained(tmp_path)
    edit(tmp_path, is_causal=False, pooling="avg")
    if release() < 5:  # that release runs it causally whatever the config says
        with pytest.raises(headswap.UnsupportedHeadError, match=r"is_causal=false.*LlamaModel"):
            headswap.load(tmp_path)
        return
    model = headswap.load(tmp_path)
    ids = rows()
    with torch.no_grad():
        states = [model.backbone(input_ids=torch.tensor([row]))[0] for row in ids]
        changed = model.backbone(input_ids=torch.tensor([[*ids[0][:-1], 98]]))[0]
        wanted = torch.cat([model.score(state.mean(1)) for state in states])
        batch = model(**padded(ids, [0, 2, 1, 4], width=16)).logits
    assert (changed[:, 0] - states[0][:, 0]).abs().max() > 1e-4
    torch.testing.assert_close(alone(model, ids), wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(batch, wanted, atol=1e-5, rtol=0)


def test_an_unknown_pooling_of_such_a_decoder_is_refused_by_name(tmp_path: Path) -> None:
    tiny("llama", SEQ, num_labels=3).save_pretrained(tmp_path)
    edit(tmp_path, is_causal=False, pooling="attentive")
    with pytest.raises(headswap.UnsupportedHeadError, match="pooling='attentive'"):
        headswap.load(tmp_path)


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model.", "model."])
def test_a_head_stored_inside_the_language_model_is_found(tmp_path: Path, prefix: str) -> None:
    reference = tiny("llama", SEQ, num_labels=3)
    reference.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    state[f"{prefix}score.weight"] = state.pop("score.weight")
    save_file(state, file, metadata={"format": "pt"})
    torch.testing.assert_close(
        alone(headswap.load(tmp_path), rows()), alone(reference, rows()), atol=1e-5, rtol=0
    )
    assert headswap.plan(tmp_path).ok


def test_an_end_mark_that_one_file_asks_for_and_another_leaves_out_is_said(tmp_path: Path) -> None:
    tokenizer = word_tokenizer()
    tiny("llama", SEQ, num_labels=2).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    edit(tmp_path, "tokenizer_config.json", add_eos_token=True)
    with pytest.warns(UserWarning, match=r"(?s)tokenizer_config\.json.*tokenizer\.json"):
        Classifier(tmp_path)
