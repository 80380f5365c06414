# SPDX-License-Identifier: Apache-2.0
"""The config fields that steer a head, each set otherwise than by default, against the class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from zoo import SEQUENCE, batch, zoo_model
from zoo_sizes import PADS_COUNT

import headswap

TOLERANCE = 1e-5
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("albert", {"embedding_size": 16}),
    ("big_bird", {"hidden_act": "relu"}),
    ("cohere_compass_text", {"pooling": "bos"}),
    ("cohere_compass_text", {"pooling": "mean"}),
    ("deberta", {"pooler_hidden_act": "tanh"}),
    ("deberta-v2", {"pooler_hidden_act": "relu"}),
    ("electra", {"embedding_size": 16}),
    ("eurobert", {"classifier_pooling": "bos"}),
    ("eurobert", {"classifier_pooling": "mean"}),
    ("flaubert", {"summary_type": "mean"}),
    ("mobilebert", {"classifier_activation": False}),
    ("modernbert", {"classifier_pooling": "mean"}),
    ("modernbert", {"classifier_bias": True, "norm_bias": True, "norm_eps": 0.1}),
    ("modernbert", {"classifier_activation": "relu"}),
    ("modernbert-decoder", {"classifier_bias": True, "classifier_activation": "silu"}),
    ("modernvbert", {"classifier_pooling": "mean"}),
    ("modernvbert", {"text_config": {"classifier_bias": True, "classifier_activation": "relu"}}),
    ("opt", {"word_embed_proj_dim": 16}),
    ("roformer", {"hidden_act": "relu"}),
    ("t5gemma", {"is_encoder_decoder": False}),
    ("ultrabert", {"classifier_pooling": "mean"}),
    ("ultravbert", {"classifier_pooling": "mean"}),
    ("xlm", {"summary_activation": "tanh"}),
    ("xlm", {"summary_type": "last"}),
    ("xlnet", {"summary_activation": "relu"}),
    ("xlnet", {"summary_type": "first"}),
    ("xlnet", {"summary_type": "mean"}),
    ("xlnet", {"summary_use_proj": False}),
    *((kind, {"num_labels": 1}) for kind in ("bert", "llama", "t5", "xlnet", "perceiver")),
]
HERE = [(kind, more) for kind, more in VARIANTS if kind in SEQUENCE]


def named(value: Any) -> str:
    return value if isinstance(value, str) else "-".join(f"{k}={v}" for k, v in value.items())


@pytest.mark.parametrize(("model_type", "fields"), HERE, ids=named)
@torch.no_grad()
def test_the_field_is_honoured(model_type: str, fields: dict[str, Any], tmp_path: Any) -> None:
    reference = zoo_model(model_type, SEQUENCE, **{"num_labels": 3, **fields})
    reference.save_pretrained(tmp_path)
    reference = type(reference).from_pretrained(tmp_path, dtype=torch.float32).eval()
    model = headswap.load(tmp_path)
    rows, padded = batch()
    alone = []
    for row in rows:
        ids = torch.tensor([row])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        alone.append(model(**inputs).logits)
        torch.testing.assert_close(alone[-1], reference(**inputs).logits, atol=TOLERANCE, rtol=0)
    if model_type not in PADS_COUNT:
        torch.testing.assert_close(model(**padded).logits, torch.cat(alone), atol=TOLERANCE, rtol=0)


def test_a_word_that_no_rule_knows_is_refused_by_field_and_value(tmp_path: Path) -> None:
    zoo_model("modernbert", SEQUENCE, num_labels=3).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text("utf-8").replace('"cls"', '"max"'), encoding="utf-8")
    with pytest.raises(headswap.HeadswapError, match=r"(?s)classifier_pooling.*max"):
        headswap.load(tmp_path)


def test_a_summary_without_labels_is_refused(tmp_path: Any) -> None:
    zoo_model("xlm", SEQUENCE, summary_proj_to_labels=False).save_pretrained(tmp_path)
    with pytest.raises(headswap.UnsupportedHeadError, match="'xlm' ends in no layer of labels"):
        headswap.load(tmp_path)
