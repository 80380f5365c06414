# SPDX-License-Identifier: Apache-2.0
"""Masks, positions and embeddings that a model may be given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import alone, padded, rows, tiny

import headswap

SEQ = "AutoModelForSequenceClassification"
MASKS = {
    "padding between": ([1, 0, 1], "padding between real tokens"),
    "nothing real": ([0, 0, 0], "no real token"),
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("model_type", ["llama", "bert"])
def test_masks_that_no_rule_can_honour_are_refused(saved: Any, model_type: str, kind: str) -> None:
    model = headswap.load(saved(model_type, SEQ, num_labels=2))
    bad, message = MASKS[kind]
    with pytest.raises(headswap.InputError, match=message) as caught:
        model(input_ids=torch.tensor([[5, 6, 7]] * 2), attention_mask=torch.tensor([[1] * 3, bad]))
    assert caught.value.rows == (1,)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bert", "roberta"])
def test_embeddings_with_a_mask_follow_the_mask(saved: Any, model_type: str) -> None:
    model = headswap.load(saved(model_type, SEQ, num_labels=3))
    ids = rows()
    batch = padded(ids, [9, 3, 6, 11], width=20)
    embeds = model.get_input_embeddings()(batch["input_ids"])
    with torch.no_grad():
        found = model(inputs_embeds=embeds, attention_mask=batch["attention_mask"]).logits
    torch.testing.assert_close(found, alone(model, ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("pads", range(8))
def test_positions_start_at_the_first_real_token(saved: Any, pads: int) -> None:
    model = headswap.load(saved("gpt2", SEQ, num_labels=3))
    ids = rows((6,))
    with torch.no_grad():
        found = model(**padded(ids, [pads], width=6 + pads)).logits
    torch.testing.assert_close(found, alone(model, ids), atol=1e-5, rtol=0)


def test_positions_of_the_caller_are_honoured(saved: Any) -> None:
    folder = saved("gpt2", SEQ, num_labels=3)
    positions = torch.tensor([[3, 4, 5]])
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "position_ids": positions}
    with torch.no_grad():
        wanted = tiny("gpt2", SEQ, num_labels=3)(**inputs).logits
        found = headswap.load(folder)(**inputs, attention_mask=torch.ones(1, 3)).logits
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def test_no_pad_id_and_no_mask_is_refused_for_a_batch_only(saved: Any) -> None:
    model = headswap.load(saved("llama", SEQ, num_labels=2, pad_token_id=None))
    ids = rows((4, 4))
    assert model(input_ids=torch.tensor(ids[:1])).logits.shape == (1, 2)
    with pytest.raises(headswap.InputError, match="pad_token_id"):
        model(input_ids=torch.tensor(ids))


def test_no_pad_id_with_a_mask_equals_single_runs(saved: Any) -> None:
    model = headswap.load(saved("llama", SEQ, num_labels=2, pad_token_id=None))
    ids = rows((4, 7))
    with torch.no_grad():
        found = model(**padded(ids, [0, 2], width=9, pad=50)).logits
    torch.testing.assert_close(found, alone(model, ids), atol=1e-5, rtol=0)


def test_without_a_mask_the_pad_id_is_searched_as_the_reference_does(saved: Any) -> None:
    folder = saved("llama", SEQ, num_labels=3)
    ids = padded(rows(), [0, 0, 0, 0], width=14)["input_ids"]
    with torch.no_grad():
        wanted = tiny("llama", SEQ, num_labels=3)(input_ids=ids).logits
        found = headswap.load(folder)(input_ids=ids).logits
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def test_ids_and_embeddings_exclude_each_other(saved: Any) -> None:
    model = headswap.load(saved("llama", SEQ, num_labels=2))
    with pytest.raises(headswap.InputError, match="either input_ids or inputs_embeds"):
        model(attention_mask=torch.ones(1, 3))


@pytest.mark.parametrize("model_type", ["mamba", "rwkv", "marian"])
def test_families_without_position_ids_take_either_padding_side(model_type: str) -> None:
    more: dict[str, Any] = {
        "marian": {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4,
                   "decoder_ffn_dim": 64},
        "rwkv": {"attention_hidden_size": 32, "context_length": 64},
        "mamba": {"state_size": 4},
    }[model_type]  # fmt: skip
    model = headswap.as_seq_cls_model(tiny(model_type, **more), num_labels=3)
    ids = rows()
    with torch.no_grad():
        found = model(**padded(ids, [9, 3, 6, 11], width=20)).logits
    torch.testing.assert_close(found, alone(model, ids), atol=1e-5, rtol=0)


def test_a_mask_that_the_backbone_cannot_follow_is_refused() -> None:
    model = headswap.as_embedding_model(tiny("fnet", "AutoModel", type_vocab_size=2))
    ids = torch.tensor([[5, 6, 7]])
    assert model(input_ids=ids, attention_mask=torch.ones_like(ids)).pooler_output.shape == (1, 32)
    with pytest.raises(headswap.InputError, match="FNetModel takes none"):
        model(input_ids=ids, attention_mask=torch.tensor([[1, 1, 0]]))


@pytest.mark.parametrize("left", [0, 3])
def test_token_rows_stay_where_their_tokens_are(left: int) -> None:
    model = headswap.as_token_cls_model(tiny("gpt2"), num_labels=4)
    ids = rows((5,))
    batch = padded(ids, [left], width=5 + left)
    with torch.no_grad():
        found = model(**batch).logits[:, left:]
        wanted = model(input_ids=torch.tensor(ids)).logits
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def test_compat_repeats_the_references_positions(saved: Any) -> None:
    folder = saved("gpt2", SEQ, num_labels=3)
    batch = padded(rows(), [9, 3, 6, 11], width=20)
    with torch.no_grad():
        wanted = tiny("gpt2", SEQ, num_labels=3)(**batch).logits
        found = headswap.load(folder, pooling="compat")(**batch).logits
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
