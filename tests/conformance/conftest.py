# SPDX-License-Identifier: Apache-2.0
"""Counts what was exact; tests/conftest.py says so at the end of a run."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def counted(record_property: Any, request: Any) -> Any:
    """Call with a kind and, for what cannot be compared, the reason."""

    def count(kind: str, reason: str = "") -> None:
        name = request.node.callspec.id
        record_property(kind, f"- {name}: {reason}" if reason else name)

    return count
