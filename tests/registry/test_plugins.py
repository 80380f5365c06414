# SPDX-License-Identifier: Apache-2.0
"""Entry points: found on the first miss, in every process, each on its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headswap.registry import AdapterRegistry, PluginWarning, UnknownArchitectureError, load_tables

GROUP = "headswap.adapters"


def install(folder: Path, name: str, code: str, target: str) -> None:
    """What pip leaves behind: a module and a distribution that declares the entry point."""
    (folder / f"{name}.py").write_text(code)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dist-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {target}\n")


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(
        tmp_path, "good",
        "class Model: pass\n"
        "def register(registry):\n"
        "    open(__file__ + '.calls', 'a').write('x')\n"
        "    registry.register('GoodForCausalLM', 'good:Model')\n"
        "    registry.register_head_family('good-head', 'good:Model')\n",
        "good:register",
    )  # fmt: skip
    install(tmp_path, "broken", "raise RuntimeError('no libfoo')", "broken:register")
    install(
        tmp_path, "halfway",
        "def register(registry):\n"
        "    registry.register('HalfForCausalLM', 'good:Model')\n"
        "    registry.register('LlamaForCausalLM', 'good:Model')\n",
        "halfway:register",
    )  # fmt: skip
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def fresh() -> AdapterRegistry:
    return AdapterRegistry(entry_point_group=GROUP, tables=load_tables)


def test_plugins_are_read_on_the_first_miss_and_once(plugins: Path) -> None:
    registry = fresh()
    registry.resolve("LlamaForCausalLM", "classify")
    calls = plugins / "good.py.calls"
    assert not calls.exists()
    with pytest.warns(PluginWarning):
        registry.resolve("GoodForSequenceClassification")
    with pytest.raises(UnknownArchitectureError):
        registry.resolve("NobodyForCausalLM")
    assert calls.read_text() == "x"
    assert registry.owner("GoodForCausalLM") == "dist-good"


def test_a_broken_plugin_is_named_and_stops_no_other(plugins: Path) -> None:
    registry = fresh()
    with pytest.warns(PluginWarning) as caught:
        found = registry.resolve("GoodForSequenceClassification")
    assert found.entry.architecture == "GoodForCausalLM"
    said = " ".join(str(w.message) for w in caught)
    for part in ("'broken'", "dist-broken", "no libfoo", "'halfway'", "dist-halfway"):
        assert part in said
    with pytest.raises(UnknownArchitectureError, match="no libfoo"):
        registry.resolve("NobodyForCausalLM")


@pytest.mark.parametrize(
    ("code", "target", "said"),
    [
        ("", "not a ref !!", "'worst'"),
        ("raise SystemExit(3)", "worst:register", "SystemExit"),
        ("def register(registry): raise SystemExit", "worst:register", "SystemExit"),
    ],
)
def test_nothing_that_a_plugin_does_stops_another(
    plugins: Path, code: str, target: str, said: str
) -> None:
    install(plugins, "worst", code, target)
    registry = fresh()
    with pytest.warns(PluginWarning) as caught:
        assert registry.owner("GoodForCausalLM") == "dist-good"
    worst = [line for line in map(str, (w.message for w in caught)) if "dist-worst" in line]
    assert len(worst) == 1
    assert said in worst[0]


def test_a_name_that_another_thread_brought_meanwhile_is_found(
    plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = fresh()
    missed, go = threading.Event(), threading.Event()
    read = registry._read_plugins

    def slow() -> None:
        if threading.current_thread().name == "late":
            missed.set()  # this thread looked before the other read, and asks after it
            go.wait(10)
        read()

    monkeypatch.setattr(registry, "_read_plugins", slow)
    found: list[str] = []
    late = threading.Thread(
        target=lambda: found.append(registry.owner("GoodForCausalLM")), name="late"
    )
    late.start()
    assert missed.wait(10)
    with pytest.warns(PluginWarning):
        registry.owner("GoodForCausalLM")
    go.set()
    late.join(10)
    assert found == ["dist-good"]


def test_a_plugin_that_fails_half_way_registers_nothing(plugins: Path) -> None:
    registry = fresh()
    with pytest.warns(PluginWarning), pytest.raises(UnknownArchitectureError):
        registry.resolve("HalfForCausalLM")
    assert registry.owner("LlamaForCausalLM") == "transformers"


def test_a_missing_head_family_asks_the_plugins_too(plugins: Path) -> None:
    with pytest.warns(PluginWarning):
        assert fresh().head_family("good-head").__name__ == "Model"


def test_another_process_finds_them_by_itself(plugins: Path) -> None:
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "from headswap.registry import global_registry\n"
        "print(global_registry.resolve('GoodForSequenceClassification').entry.load().__name__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(plugins)}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert found.stdout.strip() == "Model"
