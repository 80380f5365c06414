# SPDX-License-Identifier: Apache-2.0
"""Specs read from configs, and the table of families."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import transformers
from tiny_models import tiny_config

from headswap.heads import (
    Activation,
    Dense,
    Difference,
    Dropout,
    Field,
    HeadedModel,
    HeadFamily,
    HeadSpec,
    Softcap,
    default_family,
    families,
    family,
    native_family,
)
from headswap.heads.spec import HEAD_DROPOUT, POOLINGS, Pooling, checked_pooling
from headswap.registry import UnsupportedHeadError, global_registry

TASKS = ("classify", "reward", "token-classify")


def values(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**fields)


def rows() -> list[HeadFamily]:
    return [row for task in ("classify", "token-classify") for row in families(task)]


# -- fields ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fields", "wanted"), [
    ({}, 0.0),
    ({"classifier_dropout": None}, 0.0),
    ({"classifier_dropout": None, "hidden_dropout_prob": 0.3}, 0.3),
    ({"classifier_dropout_prob": 0.2, "hidden_dropout_prob": 0.3}, 0.2),
    ({"classifier_dropout": 0.1, "classifier_dropout_prob": 0.2}, 0.1),
    ({"classifier_dropout": 0.0, "hidden_dropout_prob": 0.3}, 0.0),
])  # fmt: skip
def test_a_field_is_the_first_name_that_is_there_and_not_none(
    fields: dict[str, Any], wanted: float
) -> None:
    assert Field(HEAD_DROPOUT, 0.0).read(values(**fields)) == wanted
    spec = HeadFamily("f", "first", (Dropout(Field(HEAD_DROPOUT, 0.0)),)).spec(values(**fields))
    assert spec.layers == (Dropout(wanted),)


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_a_built_in_head_reads_its_dropout_from_a_config(name: str) -> None:
    config = tiny_config(name, hidden_dropout_prob=0.25)
    assert Dropout(0.25) in family(name).spec(config).layers
    config = tiny_config(name, hidden_dropout_prob=0.25, classifier_dropout=0.5)
    assert Dropout(0.5) in family(name).spec(config).layers


def test_layers_without_fields_stay_as_they_are() -> None:
    layers = (Dropout(0.1), Activation("tanh"), Softcap(30.0), Difference(), Dense("a", 7, False))
    assert HeadFamily("f", "mean", layers).spec(values()).layers == layers


# -- paths and tensors ----------------------------------------------------------------------------


@pytest.mark.parametrize(("base", "pooler"), [("bert", "bert.pooler.dense"),
                                              ("model.text", "model.text.pooler.dense"),
                                              (None, "pooler.dense")])  # fmt: skip
def test_a_base_in_a_path_is_the_backbones_name_or_nothing(base: Any, pooler: str) -> None:
    spec = family("bert").spec(tiny_config("bert"), base=base)
    assert [layer.path for layer in spec.dense] == [pooler, "classifier"]
    assert spec.output == Dense("classifier", "labels")


@pytest.mark.parametrize(("name", "tensors"), [
    ("score", ("score.weight",)),
    ("ctrl", ("classifier.weight",)),
    ("bert", ("bert.pooler.dense.bias", "bert.pooler.dense.weight", "classifier.bias",
              "classifier.weight")),
    ("roberta", ("classifier.dense.bias", "classifier.dense.weight", "classifier.out_proj.bias",
                 "classifier.out_proj.weight")),
    ("token-score", ("score.bias", "score.weight")),
    ("token-classifier", ("classifier.bias", "classifier.weight")),
])  # fmt: skip
def test_tensors_are_the_sorted_names_in_a_state_dict(name: str, tensors: tuple[str, ...]) -> None:
    assert family(name).spec(values(), base="bert").tensors() == tensors


@pytest.mark.parametrize("model_type", ["bert", "roberta", "gpt2", "llama", "ctrl"])
def test_tensors_and_rate_are_those_of_transformers_own_class(model_type: str) -> None:
    more = {"ctrl": {"n_embd": 32, "n_layer": 1, "n_head": 4, "dff": 64}}.get(model_type, {})
    model = transformers.AutoModelForSequenceClassification.from_config(
        tiny_config(model_type, num_labels=3, **more)
    )
    row = native_family(model_type, type(model), "classify")
    spec = row.spec(model.config, base=model.base_model_prefix)
    stored = model.state_dict()
    assert set(spec.tensors()) <= set(stored)
    assert stored[f"{spec.output.path}.weight"].shape == (3, 32)
    own = {name for name in stored if not name.startswith(f"{model.base_model_prefix}.")}
    assert own <= set(spec.tensors())
    rates = [layer.rate for layer in spec.layers if isinstance(layer, Dropout)]
    head = {
        module.p
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Dropout) and not name.startswith(model.base_model_prefix)
    }
    assert set(rates) == head


def test_a_spec_is_a_value() -> None:
    spec = family("bert").spec(tiny_config("bert"), base="bert")
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert len({spec, family("bert").spec(tiny_config("bert"), base="bert")}) == 1
    with pytest.raises(AttributeError):
        spec.pooling = "mean"  # type: ignore[misc]


# -- poolings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_pooling_that_exists_passes(pooling: str) -> None:
    assert checked_pooling(pooling) == pooling


@pytest.mark.parametrize("pooling", ["max", "", "cls", "Last"])
def test_an_unknown_pooling_lists_those_that_exist(pooling: str) -> None:
    with pytest.raises(UnsupportedHeadError, match="last, first, mean, late, eos") as caught:
        checked_pooling(pooling)
    assert caught.value.pooling == pooling  # type: ignore[attr-defined]


def test_a_family_with_an_unknown_pooling_gives_no_spec() -> None:
    wrong: Any = "max"
    with pytest.raises(UnsupportedHeadError, match="last, first, mean, late, eos"):
        HeadFamily("mine", wrong, (Dense("score", "labels"),)).spec(values())


# -- the table ------------------------------------------------------------------------------------


def test_every_row_has_a_name_of_its_own_and_is_found_by_it() -> None:
    names = [row.name for row in rows()]
    assert len(set(names)) == len(names)
    assert {"bert", "ctrl", "roberta", "score", "token-classifier", "token-score"} <= set(names)
    assert [family(name) for name in names] == rows()


def test_every_row_ends_in_the_labels_and_pools_by_a_rule_that_exists() -> None:
    for row in rows():
        spec = row.spec(values(), base="model")
        assert spec.output.out == "labels", row.name
        assert spec.stored[-1] == spec.output, row.name
        assert [layer.out for layer in spec.dense[:-1]] == ["hidden"] * (len(spec.dense) - 1)
        assert spec.pooling in get_args(Pooling), row.name
        assert (spec.pooling == "all") == (row.task == "token-classify"), row.name


def test_no_model_type_has_two_rows_for_a_task() -> None:
    claimed = [(row.task, model_type) for row in rows() for model_type in row.model_types]
    assert len(set(claimed)) == len(claimed)


def test_a_reward_head_is_a_classifiers() -> None:
    assert list(families("reward")) == list(families("classify"))
    assert {row.task for row in families("reward")} == {"classify"}
    assert {row.task for row in families("token-classify")} == {"token-classify"}


@pytest.mark.parametrize(("task", "name"), [("classify", "score"), ("reward", "score"),
                                            ("token-classify", "token-score")])  # fmt: skip
def test_the_head_given_to_a_class_without_one(task: Any, name: str) -> None:
    assert default_family(task).name == name


def test_a_registered_family_is_found_and_serves_its_model_types() -> None:
    mine = HeadFamily("mine", "mean", (Dense("out", "labels"),), frozenset({"toy"}))
    registry = global_registry.copy()
    registry.register_head_family("mine", mine)
    assert family("mine", registry) is mine
    assert mine in families("classify", registry)
    assert mine not in families("token-classify", registry)
    toy = type("ToyForSequenceClassification", (), {})
    assert native_family("toy", toy, "classify", registry) is mine
    with pytest.raises(UnsupportedHeadError, match="Unknown head family 'mine'"):
        family("mine")


def test_a_thing_that_is_no_family_is_refused_by_name() -> None:
    registry = global_registry.copy()
    registry.register_head_family("odd", {"pooling": "last"})
    with pytest.raises(UnsupportedHeadError, match=r"'odd'.*must be a HeadFamily"):
        family("odd", registry)


def test_an_unknown_head_lists_every_name() -> None:
    with pytest.raises(UnsupportedHeadError, match="'nobody'") as caught:
        family("nobody")
    assert all(row.name in str(caught.value) for row in rows())
    assert "register_head_family" in str(caught.value)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("task", ["classify", "reward"])
def test_causal_models_have_the_score_head(model_type: str, task: Any) -> None:
    auto = transformers.AutoModelForSequenceClassification
    cls = auto._model_mapping[type(tiny_config(model_type))]
    assert native_family(model_type, cls, task).name == "score"


def test_a_class_that_no_row_describes_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedHeadError, match="LayoutLMv2ForSequenceClassification") as caught:
        native_family("layoutlmv2", transformers.LayoutLMv2ForSequenceClassification, "classify")
    assert caught.value.model_type == "layoutlmv2"  # type: ignore[attr-defined]
    assert "register_head_family" in str(caught.value)


def test_a_converted_model_is_what_other_parts_ask_for() -> None:
    class Headed:
        config = values()
        head_spec = HeadSpec("f", "last")
        backbone = torch.nn.Identity()

        def logits_of(self, found: torch.Tensor) -> torch.Tensor:
            return found

        def rows(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            return inputs["input_ids"]

    assert isinstance(Headed(), HeadedModel)
    assert not isinstance(torch.nn.Linear(1, 1), HeadedModel)
