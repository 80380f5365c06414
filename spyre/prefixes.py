# SPDX-License-Identifier: Apache-2.0
"""Which rows begin alike, so that what stands at their start runs once: bookkeeping, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

LEAST = 16
"""Tokens that a shared beginning has at least; attention over fewer costs more than they save."""
Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class Group:
    """`rows` (indices) whose first `shared` tokens are the same; each has one more at least."""

    rows: tuple[int, ...]
    shared: int = 0

    def tokens(self, lengths: Sequence[int]) -> int:
        """Tokens that run, by all rows' `lengths`."""
        return self.shared + sum(lengths[row] - self.shared for row in self.rows)


@dataclass(slots=True)
class _Span:
    """Sorted rows `start` to `end` that begin alike for `shared` tokens, and the spans in it: all
    of them, then those that do not share with the rest of it."""

    shared: int
    start: int
    inner: list[_Span] = field(default_factory=list)
    end: int = 0
    saved: int = 0

    def close(self, end: int) -> None:
        """Leave apart the spans inside that save more so, and count what is saved."""
        self.end = end
        each = self.shared if self.shared >= LEAST else 0
        apart = [span for span in self.inner if span.saved >= len(span) * each]
        alone = len(self) - sum(map(len, self.inner))
        joining = sum(span.saved for span in self.inner) - sum(span.saved for span in apart)
        if (len(self) - sum(map(len, apart)) - 1) * each <= joining + max(alone - 1, 0) * each:
            apart = self.inner
        self.inner = apart
        together = len(self) - sum(map(len, apart))
        self.saved = max(together - 1, 0) * each + sum(span.saved for span in apart)

    def __len__(self) -> int:
        return self.end - self.start

    def together(self) -> Iterator[int]:
        """The places of rows that share here."""
        taken = self.start
        for span in self.inner:
            yield from range(taken, span.start)
            taken = span.end
        yield from range(taken, self.end)


def alike(rows: Sequence[Ids]) -> list[Group]:
    """All of `rows` in groups, one beginning a group, such that many tokens are saved.

    Sorted rows that begin alike stand together, and lengths of what neighbours share make a tree
    of spans (Kasai et al. 2001, longest common prefixes); each span inside another joins it whole
    or stays apart, whichever saves more.
    """
    order = sorted(range(len(rows)), key=lambda row: tuple(rows[row]))
    found: list[Group] = []
    waiting = [_spans([rows[row] for row in order])]
    while waiting:
        span = waiting.pop()
        waiting += span.inner
        own = tuple(order[place] for place in span.together())
        if len(own) > 1 and span.shared >= LEAST:
            found.append(Group(own, span.shared))
        else:
            found += [Group((row,)) for row in own]
    return found


def _spans(rows: list[Ids]) -> _Span:
    """The tree over sorted `rows`."""
    stack = [_Span(0, 0)]
    for place in range(1, len(rows) + 1):
        shared = _common(rows[place - 1], rows[place]) if place < len(rows) else 0
        start, closed = place - 1, None
        while stack[-1].shared > shared:
            closed = stack.pop()
            closed.close(place)
            start = closed.start
            if stack[-1].shared >= shared:
                stack[-1].inner.append(closed)
                closed = None
        if stack[-1].shared < shared:
            stack.append(_Span(shared, start, [] if closed is None else [closed]))
    stack[0].close(len(rows))
    return stack[0]


def _common(one: Ids, two: Ids) -> int:
    """How many tokens both begin with, less one where that is all of a row: its last token runs."""
    most = min(len(one), len(two)) - 1
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b or i == most),
                0)  # fmt: skip


def split(group: Group, lengths: Sequence[int], tokens: int) -> Iterator[Group]:
    """`group` in parts that run at most so many `tokens` (a longer row runs alone)."""
    taken: list[int] = []
    room = tokens - group.shared
    for row in group.rows:
        own = lengths[row] - group.shared
        if taken and own > room:
            yield _part(taken, group)
            taken, room = [], tokens - group.shared
        taken.append(row)
        room -= own
    yield _part(taken, group)


def _part(rows: list[int], group: Group) -> Group:
    return Group(tuple(rows), group.shared if len(rows) > 1 else 0)


def places_of(pack: Sequence[Group]) -> list[int]:
    """The rows of `pack`, group by group."""
    return [row for group in pack for row in group.rows]


def plan_packs(rows: Sequence[Ids], tokens: int, *, shares: bool) -> list[list[Group]]:
    """Which rows run together: from long to short, in packs of at most `tokens` tokens (a longer
    row runs alone); those that begin alike as groups, where `shares`."""
    lengths = [len(row) for row in rows]
    groups = alike(rows) if shares else [Group((row,)) for row in range(len(rows))]
    parts = [part for group in groups for part in split(group, lengths, tokens)]
    sizes = {part: part.tokens(lengths) for part in parts}
    packs: list[list[Group]] = []
    room = 0
    for part in sorted(parts, key=lambda part: (-sizes[part], part.rows)):
        if not packs or sizes[part] > room:
            packs.append([])
            room = tokens
        packs[-1].append(part)
        room -= sizes[part]
    return packs
