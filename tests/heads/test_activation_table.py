# SPDX-License-Identifier: Apache-2.0
"""Every way to an activation: what was saved, how many labels, what the call asks."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headswap.heads import ActivationChoice, apply_activation, choose_activation
from headswap.registry import ConversionError

LOGITS = {
    1: torch.tensor([[1.5], [-0.25]]),
    3: torch.tensor([[0.5, -1.0, 2.0], [3.0, 3.0, -3.0]]),
}
FORMULA = {
    "identity": lambda z: z,
    "sigmoid": lambda z: 1 / (1 + torch.exp(-z)),
    "softmax": lambda z: torch.exp(z) / torch.exp(z).sum(-1, keepdim=True),
}
TORCH = "torch.nn.modules.{}"
# What is saved, who that is, the function for several labels and for one.
SAVED: list[tuple[dict[str, Any], str, str, str]] = [
    ({}, "default", "softmax", "sigmoid"),
    ({"problem_type": None}, "default", "softmax", "sigmoid"),
    ({"sentence_transformers": {"version": "5"}}, "default", "softmax", "sigmoid"),
    ({"problem_type": "regression"}, "problem_type", "identity", "identity"),
    ({"problem_type": "single_label_classification"}, "problem_type", "softmax", "sigmoid"),
    ({"problem_type": "multi_label_classification"}, "problem_type", "sigmoid", "sigmoid"),
    ({"function_to_apply": "none"}, "function_to_apply", "identity", "identity"),
    ({"function_to_apply": "sigmoid"}, "function_to_apply", "sigmoid", "sigmoid"),
    ({"function_to_apply": "softmax"}, "function_to_apply", "softmax", "sigmoid"),
    *(
        (spelling, "sentence_transformers", several, one)
        for module, several, one in (
            ("linear.Identity", "identity", "identity"),
            ("activation.Sigmoid", "sigmoid", "sigmoid"),
            ("activation.Softmax", "softmax", "sigmoid"),
        )
        for spelling in (
            {"sentence_transformers": {"activation_fn": TORCH.format(module)}},
            {"sbert_ce_default_activation_function": TORCH.format(module)},
            {"sentence_transformers": {"activation_fn": "torch.nn." + module.rpartition(".")[2]}},
        )
    ),
]


def saved_config(saved: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**saved)


@pytest.mark.parametrize(("labels", "row"), list(itertools.product((1, 3), range(len(SAVED)))))
def test_what_was_saved_gives_the_source_and_the_values(labels: int, row: int) -> None:
    saved, source, several, one = SAVED[row]
    name = one if labels == 1 else several
    found = choose_activation(saved_config(saved), num_labels=labels)
    assert (found.name, found.source) == (name, source)
    logits = LOGITS[labels]
    torch.testing.assert_close(apply_activation(logits, found), FORMULA[name](logits))


@pytest.mark.parametrize(("labels", "row", "call"), [
    (labels, row, call)
    for labels, row, call in itertools.product((1, 3), range(len(SAVED)), FORMULA)
    if (labels, call) != (1, "softmax")
])  # fmt: skip
def test_the_call_decides_whatever_was_saved(labels: int, row: int, call: str) -> None:
    found = choose_activation(saved_config(SAVED[row][0]), num_labels=labels, call=call)
    assert (found.name, found.source) == (call, "call")
    assert call in found.reason
    logits = LOGITS[labels]
    torch.testing.assert_close(apply_activation(logits, found), FORMULA[call](logits))


@pytest.mark.parametrize("row", range(len(SAVED)))
def test_a_softmax_that_the_call_asks_of_one_label_is_refused(row: int) -> None:
    with pytest.raises(ConversionError, match=r"'sigmoid' or 'identity'") as caught:
        choose_activation(saved_config(SAVED[row][0]), num_labels=1, call="softmax")
    assert caught.value.activation == "softmax"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("field", "value", "attribute", "allowed"), [
    ("problem_type", "foo", "problem_type",
     ("regression", "single_label_classification", "multi_label_classification")),
    ("problem_type", "", "problem_type", ("regression",)),
    ("function_to_apply", "identity", "function_to_apply", ("none", "sigmoid", "softmax")),
    ("sentence_transformers", {"activation_fn": "torch.nn.modules.activation.Tanh"},
     "sentence_transformers", ("Identity", "Sigmoid", "Softmax")),
    ("sentence_transformers", {"activation_fn": "somebody.models.Sigmoid"},
     "sentence_transformers", ("Identity", "Sigmoid", "Softmax")),
    ("sbert_ce_default_activation_function", "os.system", "sentence_transformers",
     ("Identity", "Sigmoid", "Softmax")),
])  # fmt: skip
@pytest.mark.parametrize("labels", [1, 3])
def test_an_unknown_saved_value_lists_the_allowed_ones(
    field: str, value: Any, attribute: str, allowed: tuple[str, ...], labels: int
) -> None:
    with pytest.raises(ConversionError) as caught:
        choose_activation(saved_config({field: value}), num_labels=labels)
    message = str(caught.value)
    assert all(name in message for name in allowed)
    assert f"Unknown {attribute}" in message
    assert hasattr(caught.value, attribute)


@pytest.mark.parametrize("call", ["Softmax", "none", "", "tanh"])
def test_an_unknown_call_lists_the_allowed_ones(call: str) -> None:
    with pytest.raises(ConversionError, match="softmax, sigmoid, identity"):
        choose_activation(saved_config({}), num_labels=3, call=call)


def test_an_unknown_saved_value_is_no_matter_to_a_call() -> None:
    found = choose_activation(saved_config({"problem_type": "foo"}), num_labels=3, call="sigmoid")
    assert (found.name, found.source) == ("sigmoid", "call")


def test_what_sentence_transformers_saved_decides_before_the_other_spellings() -> None:
    saved: dict[str, Any] = {
        "problem_type": "regression",
        "function_to_apply": "sigmoid",
        "sentence_transformers": {"activation_fn": TORCH.format("activation.Softmax")},
    }
    found = choose_activation(saved_config(saved), num_labels=3)
    assert (found.name, found.source) == ("softmax", "sentence_transformers")
    del saved["sentence_transformers"]
    found = choose_activation(saved_config(saved), num_labels=3)
    assert (found.name, found.source) == ("identity", "problem_type")
    del saved["problem_type"]
    found = choose_activation(saved_config(saved), num_labels=3)
    assert (found.name, found.source) == ("sigmoid", "function_to_apply")


def test_the_reason_repeats_the_saved_value() -> None:
    found = choose_activation(saved_config({"problem_type": "regression"}), num_labels=1)
    assert found.reason == "the checkpoint says problem_type='regression'"


def test_strong_logits_keep_distinct_probabilities_in_fp32() -> None:
    exact = torch.tensor([[12.0], [12.3], [12.6]])
    choice = choose_activation(saved_config({}), num_labels=1)
    scores = apply_activation(exact, choice).flatten()
    assert scores.dtype == torch.float32
    assert scores[0] < scores[1] < scores[2] < 1
    wanted = torch.sigmoid(exact.double()).flatten().float()
    torch.testing.assert_close(scores, wanted, rtol=0, atol=2e-7)
    # What a backbone's own dtype would give, and why the logits are widened first.
    assert torch.sigmoid(exact.bfloat16()).unique().numel() == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", list(FORMULA))
def test_scores_of_any_dtype_are_computed_in_fp32(name: Any, dtype: torch.dtype) -> None:
    logits = torch.tensor([[12.0, 12.3, 12.6], [-9.0, 0.0, 4.0]]).to(dtype)
    scores = apply_activation(logits, ActivationChoice(name, "call", ""))
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, FORMULA[name](logits.float()), rtol=1e-6, atol=1e-7)


def test_multi_label_scores_are_no_distribution_and_softmax_is_one() -> None:
    logits = LOGITS[3]
    several = apply_activation(logits, ActivationChoice("sigmoid", "call", ""))
    one = apply_activation(logits, ActivationChoice("softmax", "call", ""))
    assert several.sum(-1).tolist() != pytest.approx([1, 1], abs=0.05)
    assert one.sum(-1).tolist() == pytest.approx([1, 1])


@given(st.floats(-30, 30), st.floats(-30, 30))
def test_two_columns_and_their_difference_agree(no: float, yes: float) -> None:
    pair = torch.tensor([[no, yes]])
    softmax = apply_activation(pair, ActivationChoice("softmax", "call", ""))[0, 1]
    difference = pair[:, 1:] - pair[:, :1]
    sigmoid = apply_activation(difference, ActivationChoice("sigmoid", "call", ""))[0, 0]
    torch.testing.assert_close(softmax, sigmoid, rtol=0, atol=1e-6)
