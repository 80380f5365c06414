# SPDX-License-Identifier: Apache-2.0
"""Calibration of logits: the formula, every spelling, who decided, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headswap.heads import Calibration, apply_activation, choose_activation, choose_calibration
from headswap.registry import ConversionError


def config(**fields: Any) -> Any:
    return SimpleNamespace(**fields)


SECTION = {"pooling_type": "LAST", "use_activation": True}
SAVED: list[dict[str, Any]] = [
    {"logit_mean": 1.0, "logit_sigma": 2.0},
    {"logit_mean": 1, "pooler_config": {"logit_sigma": 2}},
    {"pooler_config": {**SECTION, "logit_mean": 1.0, "logit_sigma": 2.0}},
    {"pooler_config": {**SECTION, "logit_bias": 1.0, "logit_scale": 0.5}},
    {"logit_sigma": 2.0, "pooler_config": {"logit_sigma": 2.0, "logit_bias": 1.0}},
]


@pytest.mark.parametrize("saved", SAVED)
def test_a_saved_mean_and_sigma_stand_before_the_activation(saved: dict[str, Any]) -> None:
    found = choose_calibration(config(**saved))
    assert (found.mean, found.sigma, found.temperature) == (1.0, 2.0, 1.0)
    assert found.source == "checkpoint"
    assert found.reason.startswith("the checkpoint says logit_")
    logits = torch.tensor([[3.0]])
    choice = choose_activation(config(), num_labels=1)
    scores = apply_activation(found.apply(logits), choice)
    torch.testing.assert_close(scores, torch.sigmoid(torch.tensor([[1.0]])))
    assert logits.item() == 3.0


@pytest.mark.parametrize("call", [
    {"mean": 1.0, "sigma": 2.0}, {"mean": 1.0, "scale": 0.5},
    {"logit_bias": 1.0, "logit_scale": 0.5}, Calibration(mean=1.0, sigma=2.0),
])  # fmt: skip
@pytest.mark.parametrize("saved", [{}, {"temperature": 7.0}, {"headswap": {"temperature": 9.0}}])
def test_the_call_decides_whatever_was_saved(call: Any, saved: dict[str, Any]) -> None:
    found = choose_calibration(config(**saved), call)
    assert found.source == "call"
    assert found.apply(torch.tensor([3.0])).item() == 1.0
    assert choose_calibration(config(**saved), {}).apply(torch.tensor([3.0])).item() == 3.0


@pytest.mark.parametrize(("saved", "source"), [
    ({"temperature": 0.5}, "checkpoint"),
    ({"temperature": 0.5, "architectures": ["BertForSequenceClassification"]}, "checkpoint"),
    ({"pooler_config": {"temperature": 0.5}}, "checkpoint"),
    ({"headswap": {"temperature": 0.5}}, "headswap"),
    ({"headswap": {"temperature": 0.5}, "logit_mean": 4.0, "temperature": 8.0}, "headswap"),
])  # fmt: skip
def test_a_saved_temperature_divides_the_logits(saved: dict[str, Any], source: str) -> None:
    found = choose_calibration(config(**saved))
    assert found.source == source
    assert found.apply(torch.tensor([3.0])).item() == 6.0


def test_all_three_numbers_act_in_one_order() -> None:
    found = Calibration(mean=1.0, sigma=4.0, temperature=0.5)
    assert found.apply(torch.tensor([3.0], dtype=torch.bfloat16)).tolist() == [1.0]
    assert found.apply(torch.tensor([3.0], dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("saved", [
    {}, {"temperature": None}, {"temperature": 1.0, "top_p": 0.5, "do_sample": True},
    {"temperature": 0.6, "architectures": ["LlamaForCausalLM"], "top_p": 0.9},
    {"temperature": 0.6, "architectures": ["GPT2LMHeadModel"]},
    {"logit_scale": 0.0625},  # Cohere's, of its language model
    {"pooler_config": SECTION}, {"headswap": {"task": "reward"}},
])  # fmt: skip
def test_what_is_no_calibration_is_not_taken_for_one(saved: dict[str, Any]) -> None:
    found = choose_calibration(config(**saved))
    assert found.source == "default"
    values = torch.randn(7)
    assert torch.equal(found.apply(values), values)


def test_a_temperature_that_the_architecture_has_is_not_the_heads() -> None:
    from transformers import TapasConfig

    assert choose_calibration(TapasConfig(temperature=0.5)).source == "default"


@pytest.mark.parametrize("beside", [{"top_p": 0.9}, {"do_sample": True}, {"top_k": 10}])
def test_a_temperature_among_settings_of_generation_is_refused(beside: dict[str, Any]) -> None:
    saved = config(temperature=0.6, architectures=["LlamaForSequenceClassification"], **beside)
    with pytest.raises(ConversionError, match=r"temperature=0\.6 .*may be the head's or theirs"):
        choose_calibration(saved)
    assert choose_calibration(saved, {}).temperature == 1.0


@pytest.mark.parametrize(("wrong", "message"), [
    ({"logit_sigma": 0.0}, r"sigma=0\.0 .*above 0"),
    ({"logit_sigma": -1}, r"sigma=-1\.0 .*above 0"),
    ({"temperature": 0}, r"temperature=0\.0 .*above 0"),
    ({"temperature": float("nan")}, "no finite number"),
    ({"logit_mean": float("inf")}, "no finite number"),
    ({"logit_mean": True}, "no finite number"),
    ({"logit_mean": "1"}, "no finite number"),
    ({"headswap": {"temperature": -2.0}}, r"temperature=-2\.0 .*above 0"),
    ({"pooler_config": {"logit_scale": 0}}, "stands for 1/sigma"),
    ({"pooler_config": {"logit_scale": 2, "logit_sigma": 2}}, "sigma under two names"),
    ({"logit_mean": 1.0, "pooler_config": {"logit_mean": 2.0}}, r"logit_mean=1\.0, and"),
])  # fmt: skip
def test_a_wrong_saved_number_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        choose_calibration(config(**wrong))


@pytest.mark.parametrize(("wrong", "message"), [
    ({"sigma": 0}, "above 0"), ({"scale": 0}, "1/sigma"), ({"mean": 1, "logit_bias": 1}, "two"),
    ({"tau": 1.0}, "Unknown calibration 'tau' in the call; known: mean, "),
    ({"mean": None}, "no finite number"),
])  # fmt: skip
def test_a_wrong_call_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        choose_calibration(config(), wrong)
    with pytest.raises(ConversionError, match="sigma"):
        Calibration(sigma=0.0)
