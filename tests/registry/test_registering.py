# SPDX-License-Identifier: Apache-2.0
"""Registering: duplicates, bulk, replacing, forms, errors."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headswap.registry import (
    AdapterEntry,
    AdapterImportError,
    AdapterRegistry,
    DuplicateArchitectureError,
    RegistrationError,
    RemovedArchitectureError,
    RenamedArchitectureError,
    TaskError,
    UnknownArchitectureError,
    global_registry,
)


class ToyForCausalLM:
    """Stands for a downstream class."""


class OtherForCausalLM:
    """Another one."""


@pytest.fixture
def registry() -> AdapterRegistry:
    return global_registry.copy()


def test_a_call_and_a_decorator_do_the_same_and_return_their_argument(
    registry: AdapterRegistry,
) -> None:
    assert registry.register("ToyForCausalLM", ToyForCausalLM) is ToyForCausalLM

    @registry.register("AForCausalLM")
    @registry.register("BForCausalLM")
    class Both:
        pass

    assert registry.get("AForCausalLM").load() is registry.get("BForCausalLM").load() is Both
    assert registry.get("ToyForCausalLM").task == "generate"


def test_a_bulk_registration_with_one_clash_registers_nothing(registry: AdapterRegistry) -> None:
    bulk = {"NewForCausalLM": ToyForCausalLM, "LlamaForCausalLM": ToyForCausalLM,
            "BertModel": ToyForCausalLM}  # fmt: skip
    with pytest.raises(DuplicateArchitectureError) as caught:
        registry.register_many(bulk)
    assert [(name, old) for name, old, _ in caught.value.clashes] == [
        ("LlamaForCausalLM", "transformers"),
        ("BertModel", "transformers"),
    ]
    assert all(new == __name__ for _, _, new in caught.value.clashes)
    assert "LlamaForCausalLM" in str(caught.value)
    assert "replace=True" in str(caught.value)
    with pytest.raises(UnknownArchitectureError):
        registry.get("NewForCausalLM")
    registry.register_many(bulk, replace=True)
    assert all(registry.get(name).load() is ToyForCausalLM for name in bulk)


def test_a_replacement_takes_effect_after_the_first_use(registry: AdapterRegistry) -> None:
    registry.register("ToyForCausalLM", ToyForCausalLM)
    assert registry.resolve("ToyForSequenceClassification").entry.load() is ToyForCausalLM
    with pytest.raises(DuplicateArchitectureError):
        registry.register("ToyForCausalLM", OtherForCausalLM)
    registry.register("ToyForCausalLM", OtherForCausalLM, replace=True)
    assert registry.resolve("ToyForSequenceClassification").entry.load() is OtherForCausalLM


def test_the_same_target_again_is_no_clash(registry: AdapterRegistry) -> None:
    for _ in range(2):
        registry.register("ToyForCausalLM", ToyForCausalLM)
    assert registry.owner("ToyForCausalLM") == __name__


@pytest.mark.parametrize("target", ["no_colon", "a:", ":B", "a b:C", "a:B-C", 3, object()])
def test_targets_of_another_form_are_refused(registry: AdapterRegistry, target: Any) -> None:
    with pytest.raises(RegistrationError):
        registry.register("ToyForCausalLM", target)


@pytest.mark.parametrize("name", ["", "has space", "dash-ed", "a.b", None, 3])
def test_names_that_are_no_class_names_are_refused(registry: AdapterRegistry, name: Any) -> None:
    with pytest.raises(RegistrationError):
        registry.register(name, ToyForCausalLM)


def test_a_lazy_target_is_imported_on_use_only(registry: AdapterRegistry) -> None:
    registry.register("ToyForCausalLM", "no.such.module:Toy", install_hint="pip install toy")
    assert registry.resolve("ToyForSequenceClassification").entry.architecture == "ToyForCausalLM"
    with pytest.raises(AdapterImportError) as caught:
        registry.get("ToyForCausalLM").load()
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    for part in ("ToyForCausalLM", "No module named 'no'", "pip install toy"):
        assert part in str(caught.value)


def test_the_cause_of_a_failing_import_is_kept(tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "needs_foo.py").write_text("raise ImportError('libfoo.so is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    entry = AdapterEntry("ToyForCausalLM", "needs_foo:Toy")
    with pytest.raises(AdapterImportError, match=r"ToyForCausalLM.*libfoo\.so is missing"):
        entry.load()


@pytest.mark.parametrize(("target", "text"), [
    ("json:NoSuch", "has no attribute"), ("json:dumps", "not a class"),
])  # fmt: skip
def test_what_is_not_there_and_what_is_no_class_differ(target: str, text: str) -> None:
    with pytest.raises(AdapterImportError, match=text):
        AdapterEntry("ToyForCausalLM", target).load()


def test_removed_renamed_and_unknown_are_three_errors(registry: AdapterRegistry) -> None:
    registry.retire("OldModel", removed_in="toy 2.0", install_hint="pip install 'toy<2'")
    registry.retire("MovedModel", renamed_to="NewModel")
    with pytest.raises(RemovedArchitectureError, match=r"toy 2\.0.*pip install 'toy<2'"):
        registry.resolve("OldModel")
    with pytest.raises(RenamedArchitectureError, match="NewModel"):
        registry.resolve("MovedModel")
    with pytest.raises(UnknownArchitectureError):
        registry.resolve("Nonsense")


def test_an_alias_serves_and_says_so_once(registry: AdapterRegistry) -> None:
    registry.register_alias("OldLlama", "LlamaForCausalLM")
    with pytest.warns(DeprecationWarning, match=r"OldLlama.*LlamaForCausalLM") as caught:
        found = registry.resolve("OldLlama", "classify")
    assert len(caught) == 1
    assert found.rule == "alias"
    assert found.requested == "OldLlama"
    assert found.entry.architecture == "LlamaForSequenceClassification"
    with pytest.raises(DuplicateArchitectureError):
        registry.register_alias("BertModel", "LlamaForCausalLM")


def test_an_alias_of_an_alias_is_followed(registry: AdapterRegistry) -> None:
    registry.register_alias("OldLlama", "LlamaForCausalLM")
    registry.register_alias("OlderLlama", "OldLlama")
    with pytest.warns(DeprecationWarning, match=r"OlderLlama .* of LlamaForCausalLM"):
        assert registry.resolve("OlderLlama", "classify").entry.model_type == "llama"
    with pytest.raises(RegistrationError, match="alias of itself"):
        registry.register_alias("LlamaForCausalLM2", "LlamaForCausalLM2")
    with pytest.raises(RegistrationError, match="alias of itself"):
        registry.register_alias("OldLlama", "OlderLlama", replace=True)


def test_an_alias_in_the_place_of_an_entry_takes_effect_or_is_refused(
    registry: AdapterRegistry,
) -> None:
    registry.register("ToyForCausalLM", ToyForCausalLM)
    with pytest.raises(DuplicateArchitectureError):
        registry.register_alias("ToyForCausalLM", "LlamaForCausalLM")
    registry.register_alias("ToyForCausalLM", "LlamaForCausalLM", replace=True)
    with pytest.warns(DeprecationWarning, match="old name"):
        assert registry.get("ToyForCausalLM").architecture == "LlamaForCausalLM"
    with pytest.raises(DuplicateArchitectureError, match="owned by transformers"):
        registry.register_alias("GemmaForCausalLM", "LlamaForCausalLM", replace=True)


@pytest.mark.parametrize("wrong", [None, 3, "P 1", "", "a.b"])
def test_what_is_no_name_is_refused_before_anything_is_stored(
    registry: AdapterRegistry, wrong: Any
) -> None:
    for call in (
        lambda: registry.register_alias(wrong, "LlamaForCausalLM"),
        lambda: registry.register_alias("OldLlama", wrong),
        lambda: registry.retire(wrong, removed_in="1.0"),
        lambda: registry.retire("OldModel", renamed_to=wrong or ""),
        lambda: registry.retire("OldModel"),
    ):
        with pytest.raises(RegistrationError):
            call()
    with pytest.raises(UnknownArchitectureError):
        registry.get(wrong)
    with pytest.raises(UnknownArchitectureError):
        registry.resolve(wrong)
    for name in ("OldLlama", "OldModel"):
        with pytest.raises(UnknownArchitectureError):
            registry.resolve(name)


def test_a_task_that_is_none_is_refused(registry: AdapterRegistry) -> None:
    with pytest.raises(TaskError, match=r"Unknown task 'foo' .*; known: generate"):
        registry.resolve("LlamaForCausalLM", "foo")  # type: ignore[arg-type]


@given(st.permutations(range(3)), st.permutations(range(3)))
def test_overrides_that_end_in_any_order_leave_nothing(entered: list[int], left: list[int]) -> None:
    registry = global_registry.copy()
    registry.register("ToyForCausalLM", ToyForCausalLM)
    kinds = [type(f"Other{i}", (), {}) for i in range(3)]
    open_ = {i: registry.override({"ToyForCausalLM": kinds[i], "TmpModel": kinds[i]})
             for i in range(3)}  # fmt: skip
    standing = []
    for i in entered:
        open_[i].__enter__()
        standing.append(i)
        assert registry.get("ToyForCausalLM").load() is kinds[i]
    for i in left:
        open_[i].__exit__(None, None, None)
        standing.remove(i)
        top = kinds[standing[-1]] if standing else ToyForCausalLM
        assert registry.get("ToyForCausalLM").load() is top
    with pytest.raises(UnknownArchitectureError):
        registry.get("TmpModel")


def test_values_are_frozen_and_a_conversion_leaves_the_base_alone(
    registry: AdapterRegistry,
) -> None:
    before = registry.resolve("GraniteForCausalLM")
    converted = registry.resolve("GraniteForSequenceClassification")
    assert converted.architecture == "GraniteForSequenceClassification"
    assert registry.resolve("GraniteForCausalLM") == before
    assert before.entry == converted.entry
    for value in (before, before.entry):
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.architecture = "x"  # type: ignore[misc]


def test_a_copy_is_independent(registry: AdapterRegistry) -> None:
    other = registry.copy()
    other.register("ToyForCausalLM", ToyForCausalLM)
    with pytest.raises(UnknownArchitectureError):
        registry.get("ToyForCausalLM")


def test_override_puts_back_only_what_it_changed(registry: AdapterRegistry) -> None:
    registry.register("ToyForCausalLM", ToyForCausalLM)
    with registry.override({"ToyForCausalLM": OtherForCausalLM, "TmpModel": OtherForCausalLM}):
        assert registry.get("ToyForCausalLM").load() is OtherForCausalLM
        threaded(registry.register, "MeanwhileModel", ToyForCausalLM)
    assert registry.get("ToyForCausalLM").load() is ToyForCausalLM
    assert registry.get("MeanwhileModel").load() is ToyForCausalLM
    with pytest.raises(UnknownArchitectureError):
        registry.get("TmpModel")


def threaded(call: Callable[..., Any], *arguments: Any) -> None:
    thread = threading.Thread(target=call, args=arguments)
    thread.start()
    thread.join()


def test_parallel_registration_and_resolution_equal_the_serial_ones() -> None:
    names = [f"Toy{i}x{j}ForCausalLM" for i in range(8) for j in range(40)]
    serial, parallel = global_registry.copy(), global_registry.copy()
    found: dict[str, str] = {}

    def work(registry: AdapterRegistry, part: list[str]) -> None:
        for name in part:
            registry.register(name, ToyForCausalLM)
            asked = name.replace("ForCausalLM", "ForSequenceClassification")
            found[asked] = registry.resolve(asked).entry.architecture

    threads = [threading.Thread(target=work, args=(parallel, names[i::8])) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = dict(found)
    work(serial, names)
    assert together == found
    assert parallel.names() == serial.names()


def test_head_families_and_weight_rules(registry: AdapterRegistry) -> None:
    family = object()
    assert registry.register_head_family("mine", family) is family
    assert registry.head_family("mine") is family
    registry.register_head_family("lazy", "json:dumps")
    assert registry.head_family("lazy").__name__ == "dumps"
    before = set(global_registry.head_families())
    assert registry.head_families() == tuple(sorted({"lazy", "mine"} | before))
    assert registry.head_family("nobody") is None
    with pytest.raises(DuplicateArchitectureError, match="mine"):
        registry.register_head_family("mine", object())
    rule = registry.register_weight_rule("ToyForCausalLM", r"^old\.", "new.")
    assert registry.weight_rules("ToyForCausalLM") == (rule,)
    assert registry.weight_rules("LlamaForCausalLM") == ()
    with pytest.raises(RegistrationError, match="regular expression"):
        registry.register_weight_rule("ToyForCausalLM", "(", "")
    with pytest.raises(DuplicateArchitectureError):
        registry.register_weight_rule("ToyForCausalLM", r"^old\.", "other.")
