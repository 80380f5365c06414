# SPDX-License-Identifier: Apache-2.0
"""`import headswap` in a fresh process: what it loads, and what it costs beside a bare start."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

HEAVY = ("torch", "transformers", "numpy", "safetensors", "rich", "typer", "importlib.metadata")
RUNS = 5


def python(code: str) -> str:
    # From a neutral folder: the checkout's root must not help an import along.
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def loaded(statement: str) -> set[str]:
    """The modules of HEAVY that `statement` adds to those which a start loads anyway."""
    asked = f"{{m for m in {HEAVY!r} if m in sys.modules}}"
    code = f"import sys; before = {asked}; {statement}; print(*({asked} - before))"
    return set(python(code).split())


def seconds(statement: str) -> float:
    start = time.perf_counter()
    python(statement)
    return time.perf_counter() - start


@pytest.mark.parametrize(
    "statement",
    ["import headswap", "import headswap; dir(headswap)", "import headswap; headswap.__all__"],
)
def test_the_facade_loads_nothing_heavy(statement: str) -> None:
    assert loaded(statement) == set()


def test_the_registry_loads_neither_torch_nor_transformers() -> None:
    assert not loaded("import headswap.registry") & {"torch", "transformers", "numpy"}


def test_import_time_is_recorded(record_property: Callable[[str, object], None]) -> None:
    """A record, not a limit: a busy machine must not fail a test."""
    bare, ours = [], []
    for _ in range(RUNS):
        bare.append(seconds("import json"))
        ours.append(seconds("import headswap"))
    ratio = statistics.median(ours) / statistics.median(bare)
    record_property("import_time_ratio", round(ratio, 3))
    print(f"import headswap / import json, median of {RUNS}: {ratio:.2f}")
