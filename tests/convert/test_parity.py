# SPDX-License-Identifier: Apache-2.0
"""Our logits against transformers' own classification classes, by value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import DECODERS, ENCODERS, alone, padded, rows, tiny

import headswap

SEQ = "AutoModelForSequenceClassification"
FAMILIES = (*DECODERS, *ENCODERS)


@pytest.mark.parametrize("labels", [1, 2, 3])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_stored_head_gives_the_reference_logits(saved: Any, model_type: str, labels: int) -> None:
    folder = saved(model_type, SEQ, num_labels=labels)
    reference = tiny(model_type, SEQ, num_labels=labels)
    ids = rows()
    wanted = alone(reference, ids)
    model = headswap.load(folder)
    assert isinstance(model, headswap.SequenceClassificationModel)
    assert model.config.num_labels == labels
    torch.testing.assert_close(alone(model, ids), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("left", [[0, 0, 0, 0], [9, 3, 6, 11], [2, 0, 5, 1]])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_padding_on_any_side_changes_nothing(saved: Any, model_type: str, left: list[int]) -> None:
    model = headswap.load(saved(model_type, SEQ, num_labels=3))
    ids = rows()
    with torch.no_grad():
        found = model(**padded(ids, left, width=20)).logits
    torch.testing.assert_close(found, alone(model, ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_pad_id_inside_the_text_is_text(saved: Any, model_type: str) -> None:
    model = headswap.load(saved(model_type, SEQ, num_labels=3))
    ids = [[5, 6, 1, 7, 1], [8, 9, 10, 11, 12, 13]]
    with torch.no_grad():
        found = model(**padded(ids, [3, 0], width=9)).logits
    torch.testing.assert_close(found, alone(model, ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2"])
def test_compat_pooling_repeats_the_pad_id_rule(saved: Any, model_type: str) -> None:
    folder = saved(model_type, SEQ, num_labels=3)
    reference = tiny(model_type, SEQ, num_labels=3)
    ids = [[5, 6, 7, 8, 1], [8, 9, 10, 11, 12]]  # the first ends in the pad id
    batch = padded(ids, [0, 0], width=5)
    with torch.no_grad():
        wanted = reference(**batch).logits
        compat = headswap.load(folder, pooling="compat")(**batch).logits
        ours = headswap.load(folder)(**batch).logits
    torch.testing.assert_close(compat, wanted, atol=1e-5, rtol=0)
    assert (ours[0] - wanted[0]).abs().max() > 1e-3


def test_segments_reach_the_backbone(saved: Any) -> None:
    folder = saved("bert", SEQ, num_labels=2)
    reference, model = tiny("bert", SEQ, num_labels=2), headswap.load(folder)
    ids = torch.tensor([rows((8,))[0]])
    types = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    with torch.no_grad():
        wanted = reference(input_ids=ids, token_type_ids=types).logits
        found = model(input_ids=ids, token_type_ids=types).logits
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def test_segments_are_refused_where_there_are_none(saved: Any) -> None:
    model = headswap.load(saved("llama", SEQ, num_labels=2))
    ids = torch.tensor([[5, 6, 7]])
    assert model(input_ids=ids, token_type_ids=torch.zeros_like(ids)).logits.shape == (1, 2)
    with pytest.raises(headswap.InputError, match="token_type_ids"):
        model(input_ids=ids, token_type_ids=torch.ones_like(ids))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_bf16_backbone_keeps_an_fp32_head(saved: Any, model_type: str) -> None:
    model = headswap.load(saved(model_type, SEQ, num_labels=2), dtype=torch.bfloat16)
    output = model.get_submodule(model.head_spec.output.path)
    assert output.weight.dtype == torch.float32
    assert next(model.backbone.parameters()).dtype == torch.bfloat16
    hidden = torch.randn(1, output.in_features).bfloat16()
    found = model.logits_of(hidden) if len(model.head_spec.dense) == 1 else None
    if found is not None:
        assert found.dtype == torch.float32
        torch.testing.assert_close(
            found, torch.nn.functional.linear(hidden.float(), output.weight, output.bias)
        )


@pytest.mark.parametrize("model_type", ["llama", "bert", "roberta"])
def test_rows_do_not_depend_on_their_neighbours(saved: Any, model_type: str) -> None:
    model = headswap.load(saved(model_type, SEQ, num_labels=3))
    ids = rows((4, 9, 6, 12, 3, 7))
    wanted = alone(model, ids)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(1)).tolist()
    batch = padded([ids[i] for i in order], [0, 2, 1, 0, 3, 0], width=16)
    with torch.no_grad():
        found = model(**batch).logits
    torch.testing.assert_close(found, wanted[order], atol=1e-5, rtol=0)


@pytest.mark.parametrize("model_type", ["llama", "bert"])
def test_token_classifier_matches_the_reference(saved: Any, model_type: str) -> None:
    auto = "AutoModelForTokenClassification"
    folder = saved(model_type, auto, num_labels=4)
    reference, model = tiny(model_type, auto, num_labels=4), headswap.load(folder)
    batch = padded(rows(), [0, 0, 0, 0], width=14)
    with torch.no_grad():
        wanted, found = reference(**batch).logits, model(**batch).logits
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(found[real], wanted[real], atol=1e-5, rtol=0)
