# SPDX-License-Identifier: Apache-2.0
"""Shortens a pair of texts in tokens. What is fixed (marks, a template) is never cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headswap.registry.errors import InputError
from headswap.text.given import Side, whole_number

Owners = Sequence[str | None]
QUERY, DOCUMENT = "query", "document"


@dataclass(frozen=True, slots=True)
class Budgets:
    """The most tokens of a query and of a document; 0 is no limit."""

    query: int = 0
    document: int = 0

    def __post_init__(self) -> None:
        for name in (QUERY, DOCUMENT):
            whole_number(f"max_{name}_tokens", getattr(self, name), 0)

    @property
    def any(self) -> bool:
        """Whether either text has a limit of its own."""
        return bool(self.query or self.document)


def kept(owners: Owners, counts: Mapping[str, int], side: Side = "right") -> list[int]:
    """Positions that stay when each owner keeps its first `counts[owner]` tokens (`side` "right"
    is cut), or its last."""
    if side == "left":
        last = len(owners) - 1
        return sorted(last - place for place in kept(owners[::-1], counts))
    seen = dict.fromkeys(counts, 0)
    found = []
    for position, owner in enumerate(owners):
        if owner is not None:
            seen[owner] += 1
            if seen[owner] > counts[owner]:
                continue
        found.append(position)
    return found


def lengths(owners: Owners, budgets: Budgets) -> dict[str, int]:
    """How many tokens each text has within its own budget."""
    found = {}
    for name, most in ((QUERY, budgets.query), (DOCUMENT, budgets.document)):
        length = sum(owner == name for owner in owners)
        found[name] = min(length, most) if most else length
    return found


def document_first(counts: Mapping[str, int], room: int) -> dict[str, int]:
    """Lengths that fit into `room` tokens: the document is cut first, then the query."""
    query = min(counts[QUERY], room)
    return {QUERY: query, DOCUMENT: min(counts[DOCUMENT], room - query)}


def longest_first(counts: Mapping[str, int], room: int) -> dict[str, int]:
    """Lengths that fit into `room` tokens by the rule "longest_first" of the `tokenizers` library
    (its `truncate_encodings`): the longer text is cut to the shorter, then both to a half."""
    short, long = sorted((counts[QUERY], counts[DOCUMENT]))
    if short + long > room:
        long = short if short > room else max(short, room - short)
        if short + long > room:
            short, long = room // 2, room // 2 + room % 2
    if counts[QUERY] > counts[DOCUMENT]:
        short, long = long, short
    return {QUERY: short, DOCUMENT: long}


def room_for_text(owners: Owners, limit: int) -> int:
    """Tokens that the fixed parts leave; `InputError` where they leave none."""
    fixed = sum(owner is None for owner in owners)
    if fixed >= limit:
        raise InputError(
            f"The fixed parts around a pair take {fixed} tokens, and the limit is {limit}; nothing "
            "of the texts would be left.",
            rows=(),
        )
    return limit - fixed
