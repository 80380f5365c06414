# SPDX-License-Identifier: Apache-2.0
"""Plugins, overrides and registrations that meet: nothing is lost and nobody misses a name."""

from __future__ import annotations

import multiprocessing
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headswap.registry import AdapterRegistry, global_registry, load_tables

GROUP = "headswap.adapters.of-this-test"
WAITING = 4

SLOW = """
import time
class Model: pass
def register(registry):
    time.sleep(0.3)
    registry.register("SlowForCausalLM", "slow:Model")
    registry.register_suffix_rule("ForZap", task="classify", sources=["ForCausalLM"])
    registry.register_weight_rule("SlowForCausalLM", "^old", "new")
    registry.register_alias("SlothForCausalLM", "SlowForCausalLM")
"""
DIRECT = """
registry_of_the_test = None
class Model: pass
def register(staged):
    registry_of_the_test.register("DirectForCausalLM", "direct:Model")
    staged.register("StagedForCausalLM", "direct:Model")
"""
ASKING = """
registry_of_the_test = None
class Model: pass
def register(staged):
    try:
        registry_of_the_test.resolve("NobodyForCausalLM")
    except LookupError:
        staged.register("AskingForCausalLM", "asking:Model")
"""


class FirstForCausalLM:
    """Stands for a downstream class."""


class SecondForCausalLM:
    """Another one."""


class ThirdForCausalLM:
    """And another."""


def install(folder: Path, name: str, code: str) -> None:
    (folder / f"{name}.py").write_text(code)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dist-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {name}:register\n")


def fresh() -> AdapterRegistry:
    return AdapterRegistry(entry_point_group=GROUP, tables=load_tables)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("slow", "direct", "asking", "failing"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_threads_wait_for_plugins_that_another_one_is_reading(folder: Path) -> None:
    install(folder, "slow", SLOW)
    registry = fresh()
    together = threading.Barrier(WAITING)

    def ask(_: int) -> str:
        together.wait(timeout=30)
        return registry.resolve("SlowForSequenceClassification").entry.architecture

    with ThreadPoolExecutor(WAITING) as pool:
        assert list(pool.map(ask, range(WAITING))) == ["SlowForCausalLM"] * WAITING


def test_all_that_a_plugin_adds_is_its_distributions(folder: Path) -> None:
    install(folder, "slow", SLOW)
    registry = fresh()
    assert registry.owner("SlowForCausalLM") == "dist-slow"
    assert (registry.rules[0].suffix, registry.rules[0].owner) == ("ForZap", "dist-slow")
    assert [rule.owner for rule in registry.weight_rules("SlowForCausalLM")] == ["dist-slow"]
    with pytest.warns(DeprecationWarning, match="SlothForCausalLM"):
        assert registry.resolve("SlothForCausalLM").entry.architecture == "SlowForCausalLM"


def test_what_a_plugin_registers_directly_is_kept_too(folder: Path) -> None:
    install(folder, "direct", DIRECT)
    registry = fresh()
    import direct  # type: ignore[import-not-found]

    direct.registry_of_the_test = registry
    assert registry.owner("StagedForCausalLM") == "dist-direct"
    assert registry.owner("DirectForCausalLM") == "dist-direct"


def test_a_plugin_may_ask_for_names_while_it_loads(folder: Path) -> None:
    install(folder, "asking", ASKING)
    registry = fresh()
    import asking  # type: ignore[import-not-found]

    asking.registry_of_the_test = registry
    assert registry.owner("AskingForCausalLM") == "dist-asking"


@pytest.mark.filterwarnings("error")
def test_a_warning_set_to_raise_leaves_the_other_plugins_loaded(folder: Path) -> None:
    install(folder, "failing", "raise RuntimeError('no libfoo')")
    install(folder, "slow", SLOW)
    registry = fresh()
    with pytest.raises(UserWarning, match=r"dist-failing.*no libfoo"):
        registry.get("SlowForCausalLM")
    assert registry.owner("SlowForCausalLM") == "dist-slow"
    assert len(registry.broken_plugins) == 1


def in_a_child(folder: str) -> str:
    sys.path.insert(0, folder)
    return fresh().resolve("SlowForSequenceClassification").entry.load().__name__


def test_a_spawned_child_finds_plugins_by_itself(folder: Path) -> None:
    install(folder, "slow", SLOW)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(in_a_child, (str(folder),)) == "Model"


def test_override_leaves_a_name_that_was_replaced_meanwhile() -> None:
    registry = global_registry.copy()
    registry.register("ToyForCausalLM", FirstForCausalLM)
    with registry.override({"ToyForCausalLM": SecondForCausalLM}):
        registry.register("ToyForCausalLM", ThirdForCausalLM, replace=True)
    assert registry.get("ToyForCausalLM").load() is ThirdForCausalLM


def test_override_puts_back_after_an_error() -> None:
    registry = global_registry.copy()
    before = registry.get("LlamaForCausalLM")
    with pytest.raises(KeyError), registry.override({"LlamaForCausalLM": FirstForCausalLM}):
        raise KeyError
    assert registry.get("LlamaForCausalLM") == before
