# SPDX-License-Identifier: Apache-2.0
"""Which class serves a name: every causal class of the installed transformers, and downstream's."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headswap.registry import (
    TASKS,
    SuffixRule,
    Task,
    TaskError,
    UnknownArchitectureError,
    global_registry,
)
from headswap.registry.rules import DEFAULT_RULES, split
from headswap.registry.suggest import near
from headswap.registry.tables import Tables, load_tables

TABLES = load_tables()
CAUSAL = sorted({name for names in TABLES.tables["causal"].values() for name in names})
CLASSIFIERS = TABLES.architectures("classify")
# Architectures whose classifier's stem is not their own (and which release has them).
OTHER_STEMS = {
    "Gemma3ForCausalLM": "Gemma3TextForSequenceClassification",
    "Gemma3ForConditionalGeneration": "Gemma3ForSequenceClassification",
    "Qwen3_5ForCausalLM": "Qwen3_5TextForSequenceClassification",
    "CohereCompassForCausalLM": "CohereCompassTextForSequenceClassification",
    "ReformerModelWithLMHead": "ReformerForSequenceClassification",
    "XLMWithLMHeadModel": "XLMForSequenceClassification",
}


class ToyForCausalLM:
    """Stands for a downstream class."""


@pytest.mark.parametrize("name", CAUSAL)
def test_every_causal_class_becomes_a_classifier(name: str) -> None:
    found = global_registry.resolve(name, "classify")
    assert found.task == "classify"
    assert found.architecture.endswith("ForSequenceClassification")
    assert found.native == (found.architecture in CLASSIFIERS)
    if not found.native:
        assert found.entry.architecture == name


@pytest.mark.parametrize("name", CAUSAL)
def test_every_causal_class_serves_its_classification_name(name: str) -> None:
    parts = split(name, DEFAULT_RULES)
    stem = parts[0] if parts else name
    asked = stem + "ForSequenceClassification"
    # A class of that name serves itself; of two sources with one stem the text model goes first.
    text = f"{stem}ForCausalLM"
    source = asked if asked in CLASSIFIERS else text if text in CAUSAL else name
    found = global_registry.resolve(asked)
    assert found.architecture == asked
    assert found.entry.architecture == source
    assert found.rule == ("exact" if source == asked else "suffix")
    assert found.entry.owner == "transformers"


@pytest.mark.parametrize("name", CAUSAL)
def test_the_name_of_a_converted_class_leads_back_to_what_it_was_made_from(name: str) -> None:
    for model_type in TABLES.model_types(name):
        made = global_registry.resolve(name, "classify", model_type=model_type)
        again = global_registry.resolve(made.architecture, "classify", model_type=model_type)
        # transformers' own class of that name, if there is one, has the same tensors.
        assert again.entry.architecture in (made.entry.architecture, made.architecture)


@pytest.mark.parametrize("task", ["reward", "embed", "token-classify"])
@pytest.mark.parametrize("name", CAUSAL)
def test_every_causal_class_serves_the_other_tasks(name: str, task: str) -> None:
    assert global_registry.resolve(name, task).task == task  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_native_classifier_serves_itself(name: str) -> None:
    found = global_registry.resolve(name)
    assert (found.architecture, found.entry.architecture, found.rule) == (name, name, "exact")
    with pytest.raises(TaskError, match="cannot generate"):
        global_registry.resolve(name, "generate")


@pytest.mark.parametrize("name", [n for n in OTHER_STEMS if TABLES.entry(n)])
def test_stems_that_differ(name: str) -> None:
    found = global_registry.resolve(name, "classify")
    assert found.entry.architecture == OTHER_STEMS[name]
    assert found.rule == "model type"


def test_the_model_type_decides_between_classes_of_one_architecture() -> None:
    types = [t for t in TABLES.model_types("LlamaForCausalLM") if t != "llama"]
    assert global_registry.resolve("LlamaForCausalLM", "classify", model_type="llama").native
    for other in types:
        found = global_registry.resolve("LlamaForCausalLM", "classify", model_type=other)
        assert found.native == (TABLES.by_model_type(other, "classify") is not None)


def test_a_registered_class_serves_its_names_without_entries_of_their_own() -> None:
    registry = global_registry.copy()
    registry.register("ToyForCausalLM", ToyForCausalLM)
    for name in ("ToyForSequenceClassification", "ToyForTokenClassification", "ToyForRewardModel"):
        found = registry.resolve(name)
        assert (found.entry.load(), found.rule) == (ToyForCausalLM, "suffix")
    assert registry.resolve("ToyForCausalLM", "classify").architecture == (
        "ToyForSequenceClassification"
    )
    with pytest.raises(UnknownArchitectureError) as caught:
        registry.resolve("ToyForSeqenceClassification")
    assert caught.value.suggestions[0] == "ToyForSequenceClassification"
    assert len(caught.value.suggestions) <= 3


def test_a_suffix_rule_of_ones_own_goes_first() -> None:
    registry = global_registry.copy()
    registry.register("ToyForCausalLM", ToyForCausalLM)
    registry.register_suffix_rule("ForScoring", task="classify", sources=["ForCausalLM"])
    assert registry.resolve("ToyForScoring").entry.load() is ToyForCausalLM
    assert registry.resolve("LlamaForScoring").entry.architecture == "LlamaForCausalLM"
    assert registry.rules[0].suffix == "ForScoring"


def test_a_registered_class_goes_before_transformers_own() -> None:
    registry = global_registry.copy()
    registry.register("LlamaForCausalLM", ToyForCausalLM, replace=True)
    for name, task in (("LlamaForCausalLM", "classify"), ("LlamaForSequenceClassification", None)):
        assert registry.resolve(name, task).entry.load() is ToyForCausalLM  # type: ignore[arg-type]


@given(st.text(max_size=300) | st.builds(lambda a: a * 10_000, st.characters()))
def test_an_unknown_name_gives_a_short_message(name: str) -> None:
    with pytest.raises((UnknownArchitectureError, TaskError)) as caught:
        global_registry.copy().resolve(f"{name}?")
    assert len(str(caught.value).encode()) < 1000


@given(
    st.text(max_size=300) | st.builds(lambda a: a * 10_000, st.characters()),
    st.sampled_from(DEFAULT_RULES),
    st.sampled_from(TASKS),
)
def test_a_known_suffix_and_a_task_leave_the_message_short(
    stem: str, rule: SuffixRule, task: Task
) -> None:
    with pytest.raises((UnknownArchitectureError, TaskError)) as caught:
        global_registry.copy().resolve(f"{stem}?{rule.suffix}", task)
    assert len(str(caught.value).encode()) < 1000
    assert len(getattr(caught.value, "suggestions", ())) < 10


@given(st.text(), st.lists(st.text(), max_size=30))
def test_near_misses_are_known_names_and_at_most_three(name: str, known: list[str]) -> None:
    found = near(name, known)
    assert len(found) <= 3
    assert set(found) <= set(known)


@given(st.from_regex(r"[A-Z][a-z0-9]{1,8}", fullmatch=True), st.sampled_from(DEFAULT_RULES))
def test_splitting_gives_the_stem_and_the_longest_suffix(stem: str, rule: object) -> None:
    name = stem + rule.suffix  # type: ignore[attr-defined]
    found = split(name, DEFAULT_RULES)
    assert found is not None
    assert found[0] + found[1].suffix == name
    assert len(found[1].suffix) >= len(rule.suffix)  # type: ignore[attr-defined]


def test_the_tables_read_as_text_are_the_imported_ones() -> None:
    from transformers.models.auto import modeling_auto

    imported = {
        "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "image-text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        "classify": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        "token-classify": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
        "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "base": modeling_auto.MODEL_MAPPING_NAMES,
    }
    assert set(TABLES.tables) == set(imported)
    for word, table in imported.items():
        plain = {k: (v,) if isinstance(v, str) else tuple(v) for k, v in table.items()}
        assert TABLES.tables[word] == plain


def test_no_transformers_means_empty_tables() -> None:
    assert Tables().architectures() == ()
    assert Tables().entry("LlamaForCausalLM") is None


def test_resolving_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from headswap.registry import global_registry as g;"
        "g.resolve('LlamaForCausalLM', 'classify');"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
