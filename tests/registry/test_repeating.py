# SPDX-License-Identifier: Apache-2.0
"""Registering again, several clashes at once, errors across processes, odd layouts."""

from __future__ import annotations

import pickle
import re
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
    (tmp_path / "auto").mkdir()
    if text is not None:
        (tmp_path / "auto" / "modeling_auto.py").write_text(text)
    assert tables_module._read(str(tmp_path)).tables == load_tables().tables


def test_every_causal_class_is_served_whether_a_table_lists_it_or_not() -> None:
    causal = re.compile(r"^class (\w+(?:ForCausalLM|LMHeadModel))\(", re.MULTILINE)
    files = Path(str(load_tables().folder)).glob("*/modeling_*.py")
    names = {name for file in files for name in causal.findall(file.read_text("utf-8"))}
    names = {name for name in names if not name.startswith(("Auto", "Flax", "TF"))}
    assert len(names) > 100
    registry = AdapterRegistry(tables=load_tables)
    served = {name: registry.resolve(name, "classify") for name in sorted(names)}
    unlisted = {name for name in names if not load_tables().model_types(name)}
    assert "ClvpForCausalLM" in unlisted
    for name in unlisted:
        assert served[name].entry.load().__name__ == name
    with pytest.raises(UnknownArchitectureError):
        registry.resolve("NoSuchForCausalLM")


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertModel", "Qwen2ForCausalLM", "T5Model"])
def test_a_class_of_several_model_types_has_the_one_that_it_is_named_after(name: str) -> None:
    entry = load_tables().entry(name)
    assert entry is not None
    assert name.lower().startswith(str(entry.model_type))


@pytest.mark.parametrize("table", sorted(load_tables().tables))
def test_every_name_of_a_table_has_an_entry(table: str) -> None:
    tables = load_tables()
    names = tables.class_names(table)
    assert names
    assert names == tuple(sorted(set(names)))
    assert all(tables.entry(name) is not None for name in names)


def test_a_table_that_is_not_there_has_no_names() -> None:
    assert load_tables().class_names("nonsense") == ()
