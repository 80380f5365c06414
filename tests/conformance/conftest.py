# SPDX-License-Identifier: Apache-2.0
"""Counts what was exact, and says so at the end of a run."""

from __future__ import annotations

from typing import Any

import pytest


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """`n/N exact` for each kind of comparison, and what was not compared, with its reason."""
    seen: dict[str, list[tuple[bool, str]]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            if report.when != "call":
                continue
            for kind, note in report.user_properties:
                seen.setdefault(kind, []).append((outcome == "passed", note))
    for kind, found in sorted(seen.items()):
        exact = [note for passed, note in found if passed and not note.startswith("-")]
        terminalreporter.write_line(f"{kind}: {len(exact)}/{len(found)} exact")
        for _, note in sorted(found):
            if note.startswith("-"):
                terminalreporter.write_line(f"  {note}")


@pytest.fixture
def counted(record_property: Any, request: Any) -> Any:
    """Call with a kind and, for what cannot be compared, the reason."""

    def count(kind: str, reason: str = "") -> None:
        name = request.node.callspec.id
        record_property(kind, f"- {name}: {reason}" if reason else name)

    return count
