# SPDX-License-Identifier: Apache-2.0
"""Settings that every test shares: no network, few threads, one seed, no card by default."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Before anything imports transformers: a test that needs a hub is a test that fails elsewhere.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A slow machine is no bug of the code; in CI a failure must come again at the next run.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(autouse=True)
def _seed() -> None:
    """The same random weights whichever tests ran before; free for tests that use no torch."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs the card where no stack for it is installed."""
    marked = [item for item in items if item.get_closest_marker("spyre")]
    if not marked:
        return
    from headswap.spyre.device import Stack, detect

    if detect() is Stack.NONE:
        skip = pytest.mark.skip(reason="no Spyre compiler is installed")
        for item in marked:
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """`n/N exact` for each kind of comparison, and what was not compared, with its reason."""
    seen: dict[str, list[tuple[bool, str]]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            if report.when != "call":
                continue
            for kind, note in report.user_properties:
                if not isinstance(note, str):  # another test's number
                    continue
                seen.setdefault(kind, []).append((outcome == "passed", note))
    for kind, found in sorted(seen.items()):
        exact = [note for passed, note in found if passed and not note.startswith("-")]
        terminalreporter.write_line(f"{kind}: {len(exact)}/{len(found)} exact")
        for _, note in sorted(found):
            if note.startswith("-"):
                terminalreporter.write_line(f"  {note}")
