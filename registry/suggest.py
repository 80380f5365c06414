# SPDX-License-Identifier: Apache-2.0
"""Near misses for a name that nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MOST = 3
WIDEST = 100
"""Characters of a name that a message shows; a longer one is cut, so that messages stay short."""


def near(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """At most three known names like `name`, the nearest first."""
    folded: dict[str, str] = {}
    for each in known:
        folded.setdefault(each.lower(), each)
    found = difflib.get_close_matches(name[:WIDEST].lower(), list(folded), n=MOST, cutoff=0.75)
    return tuple(folded[each] for each in found)


def shown(name: str) -> str:
    """`name` quoted, cut if it is very long (escapes of odd characters counted)."""
    quoted = repr(name[: WIDEST + 1])
    return quoted if len(quoted) <= WIDEST else f"{quoted[:WIDEST]}..."
