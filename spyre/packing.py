# SPDX-License-Identifier: Apache-2.0
"""Texts one behind the other in one row: no padding, and a prefix that several share once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headswap.spyre.masks import additive
from headswap.spyre.visibility import Visibility


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `start` to `end` of the row: a text, or what follows the shared tokens `prefix`
    (start, end) of another segment."""

    start: int
    end: int
    prefix: tuple[int, int] | None = None

    @property
    def before(self) -> int:
        """Tokens of the prefix."""
        return 0 if self.prefix is None else self.prefix[1] - self.prefix[0]


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """`segments` of a row of `total` tokens, and the masks that they need by shape; `last` says for
    which rows the last layer is wanted (`pruning.LastRows`; None: all)."""

    segments: tuple[Segment, ...]
    total: int
    last: Any = None
    _seen: dict[tuple[int, int, int, bool, int | None], Tensor | None] = field(default_factory=dict)

    def seen(self, queries: int, before: int, visibility: Visibility) -> Tensor | None:
        """Who sees whom, bool `[queries, before + queries]`, for a segment of `queries` tokens
        behind `before` of a prefix; None where plain attention does: everybody sees everybody, or
        `causal` without a prefix and without a window that matters."""
        window = visibility.window
        window = None if window is None or window >= before + queries else window
        if window is None and (not visibility.causal or not before):
            return None
        key = (queries, before, before + queries, visibility.causal, window)
        if key not in self._seen:
            places = torch.arange(before + queries)
            rule = Visibility(visibility.causal, window)
            self._seen[key] = rule.of(places[before:], places)
        return self._seen[key]

    def additive(
        self, segment: Segment, visibility: Visibility, dtype: torch.dtype
    ) -> Tensor | None:
        """`seen` of `segment` as an additive mask `[1, 1, queries, keys]`; None where everybody
        sees everybody."""
        queries, before = segment.end - segment.start, segment.before
        seen = self.seen(queries, before, visibility)
        if seen is None:
            if not visibility.causal:
                return None
            places = torch.arange(queries)
            seen = visibility.of(places, places)
        return additive(seen, dtype)[None, None]
