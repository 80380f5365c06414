# SPDX-License-Identifier: Apache-2.0
"""Specs, pooling, the executor and activations, on tensors made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from headswap.heads import (
    Activation,
    Dense,
    Difference,
    Dropout,
    Field,
    HeadFamily,
    HeadSpec,
    Softcap,
    apply_activation,
    check_mask,
    choose_activation,
    families,
    family,
    pool,
    run_head,
)
from headswap.registry import ConversionError, InputError, UnsupportedHeadError, global_registry

FAMILY = HeadFamily(
    "f",
    "first",
    (
        Dropout(Field(("own", "common"), 0.0)),
        Dense("{base}.pooler.dense"),
        Activation(Field(("hidden_act",), "gelu")),
        Dense("classifier.out", "labels", bias=False),
    ),
)


def config(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(**values)


# -- specs ----------------------------------------------------------------------------------------


def test_a_family_reads_its_fields_from_the_config() -> None:
    spec = FAMILY.spec(config(own=None, common=0.25, hidden_act="relu"), base="bert")
    assert spec.layers[0] == Dropout(0.25)
    assert spec.layers[2] == Activation("relu")
    assert FAMILY.spec(config()).layers[2] == Activation("gelu")


def test_tensors_stand_in_the_backbone_or_at_the_top() -> None:
    assert FAMILY.spec(config(), base="bert").tensors() == (
        "bert.pooler.dense.bias",
        "bert.pooler.dense.weight",
        "classifier.out.weight",
    )
    assert FAMILY.spec(config()).tensors() == (
        "classifier.out.weight",
        "pooler.dense.bias",
        "pooler.dense.weight",
    )
    assert FAMILY.spec(config()).output.path == "classifier.out"


def test_builtin_families_have_names_of_their_own() -> None:
    rows = [row for task in ("classify", "token-classify") for row in families(task)]
    assert [family(row.name) for row in rows] == rows
    claimed = [(row.task, t) for row in rows for t in row.model_types]
    assert len(set(claimed)) == len(claimed)


def test_a_registered_family_is_found_and_an_unknown_one_lists_the_names() -> None:
    registry = global_registry.copy()
    registry.register_head_family("mine", FAMILY)
    assert family("mine", registry) is FAMILY
    with pytest.raises(UnsupportedHeadError, match=r"'nobody'.*bert.*mine.*score"):
        family("nobody", registry)


# -- pooling --------------------------------------------------------------------------------------


@given(
    st.integers(1, 6),
    st.integers(0, 5),
    st.integers(0, 5),
    st.sampled_from(["last", "first", "mean"]),
)
def test_pads_on_either_side_do_not_change_what_is_pooled(
    length: int, left: int, right: int, pooling: Any
) -> None:
    hidden = torch.randn(1, length, 4, generator=torch.Generator().manual_seed(length))
    wide = torch.cat([torch.full((1, left, 4), 9.0), hidden, torch.full((1, right, 4), -9.0)], 1)
    real = torch.tensor([[False] * left + [True] * length + [False] * right])
    alone = pool(hidden, torch.ones(1, length, dtype=torch.bool), pooling)
    torch.testing.assert_close(pool(wide, real, pooling), alone)
    check_mask(real.long())


def test_the_mean_runs_in_fp32() -> None:
    states = (torch.rand(1, 700, 4096, generator=torch.Generator().manual_seed(0)) * 1e-3).half()
    real = torch.ones(1, 700, dtype=torch.bool)
    torch.testing.assert_close(pool(states, real, "mean"), states.double().mean(1).float(),
                               rtol=1e-3, atol=0)  # fmt: skip
    strided = states.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(pool(strided, real, "mean"), pool(states, real, "mean"))


@pytest.mark.parametrize(("mask", "rows", "text"), [
    ([[1, 1], [0, 0]], (1,), "no real token"),
    ([[1, 0, 1], [1, 1, 0], [1, 0, 1]], (0, 2), "between real tokens"),
])  # fmt: skip
def test_bad_masks_name_their_rows(mask: Any, rows: tuple[int, ...], text: str) -> None:
    with pytest.raises(InputError, match=text) as caught:
        check_mask(torch.tensor(mask))
    assert caught.value.rows == rows


def test_a_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(InputError, match=r"\[1, 1, 2, 2\]"):
        check_mask(torch.ones(1, 1, 2, 2))


# -- the executor ---------------------------------------------------------------------------------


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)


def test_layers_run_in_order_and_in_fp32() -> None:
    toy, rows = Toy().bfloat16().eval(), torch.randn(3, 4).bfloat16()
    layers = (Dropout(0.5), Dense("a"), Activation("tanh"), Dense("b"), Softcap(2.0), Difference())
    found = run_head(toy, HeadSpec("t", "last", layers), rows)
    a, b = toy.a.float(), toy.b.float()
    x = b(torch.tanh(a(rows.float())))
    x = 2 * torch.tanh(x / 2)
    torch.testing.assert_close(found, x[:, 1:] - x[:, :1])
    assert found.dtype == torch.float32


def test_dropout_acts_in_training_only() -> None:
    toy, rows = Toy(), torch.ones(64, 4)
    spec = HeadSpec("t", "last", (Dropout(0.5), Dense("a")))
    assert run_head(toy.train(), spec, rows).std(dim=0).max() > 0.01
    assert run_head(toy.eval(), spec, rows).std(dim=0).max() < 1e-6


def test_a_module_that_is_no_plain_linear_is_called() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    toy, rows = Toy().eval(), torch.randn(3, 4)
    plain = run_head(toy, HeadSpec("t", "last", (Dense("a"),)), rows)
    doubled = Doubled(4, 4)
    doubled.load_state_dict(toy.a.state_dict())
    toy.a = doubled
    found = run_head(toy, HeadSpec("t", "last", (Dense("a"),)), rows)
    torch.testing.assert_close(found, 2 * plain)


# -- activations ----------------------------------------------------------------------------------

SAVED = [
    ({}, 3, "softmax", "default"),
    ({}, 1, "sigmoid", "default"),
    ({"problem_type": "regression"}, 3, "identity", "problem_type"),
    ({"problem_type": "regression"}, 1, "identity", "problem_type"),
    ({"problem_type": "multi_label_classification"}, 3, "sigmoid", "problem_type"),
    ({"problem_type": "single_label_classification"}, 3, "softmax", "problem_type"),
    ({"problem_type": "single_label_classification"}, 1, "sigmoid", "problem_type"),
    ({"function_to_apply": "none"}, 2, "identity", "function_to_apply"),
    ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, 3,
     "sigmoid", "sentence_transformers"),
    ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, 1,
     "identity", "sentence_transformers"),
]  # fmt: skip


@pytest.mark.parametrize(("saved", "labels", "name", "source"), SAVED)
def test_what_a_checkpoint_saved_decides_and_is_named(
    saved: dict[str, Any], labels: int, name: str, source: str
) -> None:
    found = choose_activation(config(**saved), num_labels=labels)
    assert (found.name, found.source) == (name, source)
    asked = choose_activation(config(**saved), num_labels=labels, call="identity")
    assert (asked.name, asked.source) == ("identity", "call")


@pytest.mark.parametrize(("saved", "call", "text"), [
    ({"problem_type": "foo"}, None, "regression"),
    ({"function_to_apply": "foo"}, None, "sigmoid"),
    ({"sentence_transformers": {"activation_fn": "os.system"}}, None, "Identity"),
    ({}, "foo", "identity"),
    ({}, "softmax", "always 1"),
])  # fmt: skip
def test_unknown_values_list_the_known_ones(saved: Any, call: Any, text: str) -> None:
    with pytest.raises(ConversionError, match=text):
        choose_activation(config(**saved), num_labels=1, call=call)


def test_close_logits_keep_different_scores() -> None:
    logits = torch.tensor([[12.0], [12.3125], [12.625]], dtype=torch.bfloat16)
    scores = apply_activation(logits, choose_activation(config(), num_labels=1))
    assert len(set(scores.flatten().tolist())) == 3
    torch.testing.assert_close(scores, torch.sigmoid(logits.float()))
