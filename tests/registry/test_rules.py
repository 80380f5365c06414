# SPDX-License-Identifier: Apache-2.0
"""Suffix rules, head families, aliases and queries: forms, duplicates, replacing."""

from __future__ import annotations

from typing import Any

import pytest

from headswap.registry import (
    AdapterImportError,
    AdapterRegistry,
    DuplicateArchitectureError,
    RegistrationError,
    UnknownArchitectureError,
    global_registry,
)


class ToyForCausalLM:
    """Stands for a downstream class."""


def own_heads(registry: AdapterRegistry) -> set[str]:
    """Head families beyond those that the global registry has."""
    return set(registry.head_families()) - set(global_registry.head_families())


@pytest.fixture
def registry() -> AdapterRegistry:
    made = global_registry.copy()
    made.register("ToyForCausalLM", ToyForCausalLM, model_type="toy")
    return made


def test_a_suffix_rule_that_is_taken_is_refused_and_changes_nothing(
    registry: AdapterRegistry,
) -> None:
    before = registry.rules
    with pytest.raises(DuplicateArchitectureError) as caught:
        registry.register_suffix_rule(
            "ForSequenceClassification", task="classify", sources=["Model"], owner="me"
        )
    assert caught.value.clashes == (("ForSequenceClassification", "headswap", "me"),)
    assert registry.rules == before


def test_a_replaced_suffix_rule_decides_what_serves(registry: AdapterRegistry) -> None:
    registry.register("ToyModel", ToyForCausalLM)
    registry.register_suffix_rule(
        "ForSequenceClassification", task="classify", sources=["Model"], replace=True
    )
    found = registry.resolve("ToyForSequenceClassification")
    assert (found.entry.architecture, found.rule) == ("ToyModel", "suffix")


def test_the_sources_of_a_suffix_rule_are_tried_in_order(registry: AdapterRegistry) -> None:
    registry.register("ToyModel", ToyForCausalLM)
    registry.register_suffix_rule("ForA", task="classify", sources=["Model", "ForCausalLM"])
    registry.register_suffix_rule("ForB", task="classify", sources=["ForCausalLM", "Model"])
    assert registry.resolve("ToyForA").entry.architecture == "ToyModel"
    assert registry.resolve("ToyForB").entry.architecture == "ToyForCausalLM"


@pytest.mark.parametrize(("suffix", "sources"), [
    ("", ["Model"]), ("For-Scoring", ["Model"]), ("ForScoring", ["Mo del"]), ("ForScoring", [3]),
])  # fmt: skip
def test_suffixes_that_are_no_part_of_a_class_name_are_refused(
    registry: AdapterRegistry, suffix: str, sources: list[Any]
) -> None:
    with pytest.raises(RegistrationError):
        registry.register_suffix_rule(suffix, task="classify", sources=sources)


def test_suffix_rules_of_a_copy_stay_there(registry: AdapterRegistry) -> None:
    other = registry.copy()
    other.register_suffix_rule("ForScoring", task="classify", sources=["ForCausalLM"])
    assert other.resolve("ToyForScoring").entry.load() is ToyForCausalLM
    with pytest.raises(UnknownArchitectureError):
        registry.resolve("ToyForScoring")


def test_a_head_family_can_be_registered_as_a_decorator(registry: AdapterRegistry) -> None:
    @registry.register_head_family("mine")
    class Family:
        pass

    assert isinstance(Family, type)
    assert registry.head_family("mine") is Family


def test_a_head_family_is_replaced_at_once(registry: AdapterRegistry) -> None:
    first, second = object(), object()
    registry.register_head_family("mine", first)
    assert registry.head_family("mine") is first
    registry.register_head_family("mine", second, replace=True)
    assert registry.head_family("mine") is second


def test_the_same_head_family_again_is_no_clash(registry: AdapterRegistry) -> None:
    for _ in range(2):
        registry.register_head_family("lazy", "json:dumps")
    assert own_heads(registry) == {"lazy"}


def test_a_lazy_head_family_of_another_form_is_refused(registry: AdapterRegistry) -> None:
    with pytest.raises(RegistrationError, match=r"package\.module:Class"):
        registry.register_head_family("lazy", "json.dumps")


def test_a_lazy_head_family_is_imported_on_use_only(registry: AdapterRegistry) -> None:
    registry.register_head_family("lazy", "no.such.module:HEAD")
    assert own_heads(registry) == {"lazy"}
    with pytest.raises(AdapterImportError, match=r"lazy.*No module named 'no'"):
        registry.head_family("lazy")


def test_weight_rules_keep_their_order(registry: AdapterRegistry) -> None:
    made = [registry.register_weight_rule("ToyForCausalLM", p, "x") for p in ("^b", "^a", "^c")]
    assert registry.weight_rules("ToyForCausalLM") == tuple(made)


@pytest.mark.parametrize("old", ["LLaMAForCausalLM", "LLaMAForSequenceClassification"])
def test_old_spellings_of_llama_are_aliases(old: str) -> None:
    with pytest.warns(DeprecationWarning, match=old):
        found = global_registry.resolve(old)
    assert (found.requested, found.rule) == (old, "alias")
    assert found.entry.architecture == old.replace("LLaMA", "Llama")


def test_looking_up_an_alias_warns_too(registry: AdapterRegistry) -> None:
    registry.register_alias("OldToyForCausalLM", "ToyForCausalLM")
    with pytest.warns(DeprecationWarning, match=r"OldToyForCausalLM.*ToyForCausalLM"):
        assert registry.get("OldToyForCausalLM") == registry.get("ToyForCausalLM")


def test_an_alias_of_itself_is_refused(registry: AdapterRegistry) -> None:
    with pytest.raises(RegistrationError, match="itself"):
        registry.register_alias("NewToy", "NewToy")


def test_an_alias_that_aims_elsewhere_is_a_clash_unless_replaced(
    registry: AdapterRegistry,
) -> None:
    registry.register_alias("OldToy", "ToyForCausalLM")
    with pytest.raises(DuplicateArchitectureError, match="alias of ToyForCausalLM"):
        registry.register_alias("OldToy", "LlamaForCausalLM")
    registry.register_alias("OldToy", "LlamaForCausalLM", replace=True)
    with pytest.warns(DeprecationWarning, match="use LlamaForCausalLM"):
        assert registry.get("OldToy").architecture == "LlamaForCausalLM"


def test_registered_names_are_listed_with_transformers_own(registry: AdapterRegistry) -> None:
    assert {"ToyForCausalLM", "LlamaForCausalLM"} <= set(registry.names("generate"))
    assert "ToyForCausalLM" not in registry.names("classify")
    assert registry.names() == tuple(sorted(set(registry.names())))


def test_a_registered_model_type_is_known(registry: AdapterRegistry) -> None:
    assert registry.by_model_type("toy") == ("ToyForCausalLM",)
    assert registry.is_causal("toy")
    assert registry.by_model_type("llama")[0] == "LlamaForCausalLM"
    assert registry.by_model_type("nonsense") == ()


def test_encoders_are_not_causal() -> None:
    assert global_registry.is_causal("llama")
    assert not global_registry.is_causal("bert")


def test_override_leaves_rules_heads_and_aliases_that_came_meanwhile(
    registry: AdapterRegistry,
) -> None:
    with registry.override({"ToyForCausalLM": str}):
        registry.register_head_family("mine", int)
        registry.register_suffix_rule("ForScoring", task="classify", sources=["ForCausalLM"])
    assert own_heads(registry) == {"mine"}
    assert registry.resolve("ToyForScoring").entry.load() is ToyForCausalLM


def test_a_resolution_can_be_reported(registry: AdapterRegistry) -> None:
    assert registry.resolve("ToyForSequenceClassification").to_dict() == {
        "requested": "ToyForSequenceClassification",
        "task": "classify",
        "architecture": "ToyForSequenceClassification",
        "served_by": "ToyForCausalLM",
        "owner": __name__,
        "native": False,
        "rule": "suffix",
        "reason": f"ToyForSequenceClassification is served by ToyForCausalLM of {__name__}",
    }
