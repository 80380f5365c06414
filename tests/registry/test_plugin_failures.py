# SPDX-License-Identifier: Apache-2.0
"""Plugins that fail late, ask early, or are imported by two threads at once.

Each case runs in a process of its own: the global registry is the one under test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

GROUP = "headswap.adapters"

# Registers with the global registry and fails after it: in the module, and in the entry point.
LATE = {
    "module": """
from headswap.registry import global_registry
class Model: pass
global_registry.register("LateForCausalLM", Model)
raise RuntimeError("too late")
""",
    "call": """
from headswap.registry import global_registry
class Model: pass
def register(registry):
    registry.register("StagedForCausalLM", Model)
    global_registry.register("LateForCausalLM", Model)
    raise RuntimeError("too late")
""",
}
ASKS_EARLY = """
import time
from headswap.registry import global_registry
class Model: pass
time.sleep(0.5)
try:
    global_registry.resolve("NobodyForCausalLM")
except LookupError:
    pass
def register(registry):
    registry.register("EarlyForCausalLM", Model)
"""


def install(folder: Path, code: str) -> None:
    (folder / "toy_plugin.py").write_text(code, encoding="utf-8")
    info = folder / "toy_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dist-toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\ntoy = toy_plugin:register\n")


def python(folder: Path, code: str) -> str:
    start = "import os, threading, time\nfrom headswap.registry import global_registry as g\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", start + code],
        capture_output=True, text=True, check=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    return done.stdout.strip()


def asked(name: str) -> str:
    return (
        f"try: print(g.resolve({name!r}).entry.owner)\n"
        "except LookupError as error: print(type(error).__name__)\n"
    )


@pytest.mark.parametrize("where", sorted(LATE))
def test_a_plugin_that_fails_late_leaves_nothing_in_the_global_registry(
    tmp_path: Path, where: str
) -> None:
    install(tmp_path, LATE[where])
    names = ("LateForCausalLM", "StagedForCausalLM")
    found = python(tmp_path, "".join(asked(name) for name in names)).split()
    assert found == ["UnknownArchitectureError"] * 2


def test_a_plugin_module_may_ask_for_a_name_while_it_is_imported(tmp_path: Path) -> None:
    install(tmp_path, ASKS_EARLY)
    assert python(tmp_path, asked("EarlyForCausalLM")) == "dist-toy"


def test_a_plugin_module_that_asks_while_the_user_imports_it_still_counts(tmp_path: Path) -> None:
    install(tmp_path, ASKS_EARLY)
    assert python(tmp_path, "import toy_plugin\n" + asked("EarlyForCausalLM")) == "dist-toy"


def test_a_thread_that_imports_a_plugin_and_one_that_reads_plugins_both_end(
    tmp_path: Path,
) -> None:
    install(tmp_path, ASKS_EARLY)
    found = python(
        tmp_path,
        "def user():\n    import toy_plugin\n"
        "def reader():\n"
        "    try: g.resolve('SomebodyForCausalLM')\n"
        "    except LookupError: pass\n"
        "threads = [threading.Thread(target=t, daemon=True) for t in (user, reader)]\n"
        "threads[0].start()\n"
        "time.sleep(0.2)  # the user holds the module's import lock by now\n"
        "threads[1].start()\n"
        "for thread in threads: thread.join(10)\n"
        "print([t.is_alive() for t in threads], flush=True)\n"
        "os._exit(0)\n",
    )
    assert found == "[False, False]"


@pytest.mark.parametrize("letter", ["x", "\N{GRINNING FACE}"])
def test_a_failed_plugin_with_a_long_cause_keeps_the_message_short(
    tmp_path: Path, letter: str
) -> None:
    install(tmp_path, f"raise RuntimeError({letter!r} * 5000)")
    found = python(
        tmp_path,
        f"try: g.resolve({letter!r} * 5000)\n"
        "except LookupError as error: print(len(str(error).encode()))\n",
    )
    assert int(found) < 1000
