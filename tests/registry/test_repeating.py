# SPDX-License-Identifier: Apache-2.0
"""Registering again, several clashes at once, errors across processes, odd layouts."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from headswap.registry import (
    AdapterEntry,
    AdapterImportError,
    AdapterRegistry,
    DuplicateArchitectureError,
    RegistrationError,
    UnknownArchitectureError,
    global_registry,
    load_tables,
)
from headswap.registry import tables as tables_module


class ToyForCausalLM:
    """Stands for a downstream class."""


class OtherForCausalLM:
    """Another one."""


@pytest.fixture
def registry() -> AdapterRegistry:
    return global_registry.copy()


def test_registering_the_same_again_keeps_what_was_said(registry: AdapterRegistry) -> None:
    registry.register("ToyForCausalLM", ToyForCausalLM, head="mine", owner="me")
    before = registry.get("ToyForCausalLM")
    registry.register("ToyForCausalLM", ToyForCausalLM)
    assert registry.get("ToyForCausalLM") == before


def test_the_same_target_with_something_new_to_say_is_stored(registry: AdapterRegistry) -> None:
    registry.register("ToyForCausalLM", ToyForCausalLM)
    registry.register("ToyForCausalLM", ToyForCausalLM, head="mine")
    assert registry.get("ToyForCausalLM").head == "mine"


def test_names_that_are_taken_and_names_given_twice_are_one_error(
    registry: AdapterRegistry,
) -> None:
    entries = [
        AdapterEntry("TwiceForCausalLM", ToyForCausalLM, owner="a"),
        AdapterEntry("TwiceForCausalLM", OtherForCausalLM, owner="b"),
        AdapterEntry("LlamaForCausalLM", ToyForCausalLM, owner="c"),
    ]
    with pytest.raises(DuplicateArchitectureError) as caught:
        registry.register_many(entries)
    assert caught.value.clashes == (
        ("LlamaForCausalLM", "transformers", "c"),
        ("TwiceForCausalLM", "a", "b"),
    )
    with pytest.raises(UnknownArchitectureError):
        registry.get("TwiceForCausalLM")


def test_the_same_suffix_or_weight_rule_of_another_owner_is_no_clash(
    registry: AdapterRegistry,
) -> None:
    for owner in ("a", "b"):
        registry.register_suffix_rule("ForZap", task="classify", sources=["Model"], owner=owner)
        registry.register_weight_rule("ToyForCausalLM", "^old", "new", owner=owner)
    assert [rule.owner for rule in registry.rules if rule.suffix == "ForZap"] == ["a"]
    assert [rule.owner for rule in registry.weight_rules("ToyForCausalLM")] == ["a"]


def test_a_very_long_bad_name_is_cut_in_the_message(registry: AdapterRegistry) -> None:
    with pytest.raises(RegistrationError) as caught:
        registry.register("x y" * 5000, ToyForCausalLM)
    assert len(str(caught.value)) < 1000


def test_errors_keep_their_attributes_across_processes(registry: AdapterRegistry) -> None:
    with pytest.raises(UnknownArchitectureError) as unknown:
        registry.get("LlamaForCausalLMM")
    with pytest.raises(AdapterImportError) as failed:
        AdapterEntry("ToyForCausalLM", "no.such:Toy", install_hint="pip install toy").load()
    for error in (unknown.value, failed.value):
        back = pickle.loads(pickle.dumps(error))
        assert (type(back), str(back), vars(back)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize("text", ["MODEL_MAPPING_NAMES = OrderedDict([(A, B)])", "a b", None])
def test_a_table_that_is_no_plain_text_is_imported(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "modeling_auto.py"
    if text is not None:
        file.write_text(text)
    assert tables_module._read(str(file)) == load_tables()


@pytest.mark.parametrize("table", sorted(load_tables().tables))
def test_every_name_of_a_table_has_an_entry(table: str) -> None:
    tables = load_tables()
    names = tables.class_names(table)
    assert names
    assert names == tuple(sorted(set(names)))
    assert all(tables.entry(name) is not None for name in names)


def test_a_table_that_is_not_there_has_no_names() -> None:
    assert load_tables().class_names("nonsense") == ()
