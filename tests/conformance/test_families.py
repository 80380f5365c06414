# SPDX-License-Identifier: Apache-2.0
"""Every head family, a plugin's too, on a decoder and on an encoder that have another head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny
from transformers.activations import ACT2FN

import headswap
from headswap.convert.testing import AdapterConformance
from headswap.heads import Activation, Dense, Divide, Dropout, Norm, families
from headswap.heads.spec import Layer

FAMILIES = {row.name: row for row in families("classify")}
INSIDE = sorted(name for name, row in FAMILIES.items() if row.pooling in ("pooler", "logits"))
ANYWHERE = sorted(FAMILIES.keys() - INSIDE)
DECODER = "llama", "AutoModelForCausalLM"
ENCODER = "bert", "AutoModel"
END = 2


def pooled(states: torch.Tensor, pooling: str) -> torch.Tensor:
    """The row of one text that a rule pools, said once more in other words."""
    if pooling == "first":
        return states[:, 0]
    return states.mean(1) if pooling == "mean" else states[:, -1]  # each text ends in an end mark


def applied(model: Any, layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """One layer of a head, by torch's own modules."""
    if isinstance(layer, Dense | Norm):
        return model.get_submodule(layer.path)(x)
    if isinstance(layer, Activation):
        return ACT2FN[layer.name](x)
    if isinstance(layer, Divide):
        return x / layer.by
    assert isinstance(layer, Dropout), layer  # nothing in eval mode
    return x


class Families(AdapterConformance):
    """The shared tests, once a family."""

    kind = DECODER

    @pytest.fixture(autouse=True, params=ANYWHERE)
    def _of_the_table(self, request: pytest.FixtureRequest) -> None:
        self.head = request.param  # type: ignore[misc]

    def source(self) -> Any:
        return tiny(*self.kind)

    def rows(self) -> list[list[int]]:
        return [[*row, END] for row in super().rows()]

    def reference(self, model: Any, ids: torch.Tensor) -> torch.Tensor:
        states = model.backbone(input_ids=ids)[0]
        spec = model.head_spec
        x = states if spec.pooling == "late" else pooled(states, spec.pooling)
        for layer in spec.layers:
            x = applied(model, layer, x)
        return x.mean(1) if spec.pooling == "late" else x


class TestOnADecoder(Families):
    """Each family's head on Llama."""


class TestOnAnEncoder(Families):
    """Each family's head on BERT."""

    kind = ENCODER


@pytest.mark.parametrize("name", INSIDE)
def test_a_head_inside_its_backbone_is_refused_elsewhere(name: str) -> None:
    with pytest.raises(headswap.UnsupportedHeadError, match=name):
        headswap.as_seq_cls_model(tiny(*DECODER), head=name)


def test_several_heads_share_one_backbone() -> None:
    source = tiny(*DECODER)
    ids = torch.tensor([[5, 6, 7, 8]])
    before = source(input_ids=ids).logits
    made = [
        headswap.as_seq_cls_model(source, num_labels=3),
        headswap.as_reward_model(source),
        headswap.as_embedding_model(source),
        headswap.as_token_cls_model(source, num_labels=5),
        headswap.as_seq_cls_model(source, head="roberta"),
    ]
    own = {name: tensor.data_ptr() for name, tensor in source.model.named_parameters()}
    for model in made:
        held = {name: tensor.data_ptr() for name, tensor in model.backbone.named_parameters()}
        assert held == own, type(model).__name__
    with torch.no_grad():
        next(source.model.parameters()).add_(0.5)  # a step of training on one shows in all
        rows = [model.eval().backbone(input_ids=ids)[0] for model in made]
        changed = source(input_ids=ids).logits
    assert (changed - before).abs().max() > 1e-3
    for states in rows:
        torch.testing.assert_close(source.lm_head(states), changed, atol=1e-5, rtol=0)
