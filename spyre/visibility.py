# SPDX-License-Identifier: Apache-2.0
"""Which keys a query sees, and what happens to its scores: what every attention backend is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Feature = Literal["grouped", "bidirectional", "window", "softcap", "sinks", "alibi", "bias"]
FEATURES: tuple[Feature, ...] = (
    "grouped", "bidirectional", "window", "softcap", "sinks", "alibi", "bias",
)  # fmt: skip
"""What a layer may want of a backend beyond plain causal attention."""

SEEN = 4_096
"""Positions that `learned` looks at where a mask function names no window."""


@dataclass(frozen=True, slots=True)
class Visibility:
    """A query at position q sees the key at position k where |q - k| < `window` (None: any), and
    where `causal`, k <= q."""

    causal: bool
    window: int | None = None

    def of(self, query: Tensor, key: Tensor) -> Tensor:
        """Who sees whom, bool `[..., queries, keys]`, of positions `[..., queries]` and
        `[..., keys]` (int64)."""
        ahead = key.unsqueeze(-2) - query.unsqueeze(-1)
        seen = ahead <= 0 if self.causal else torch.ones_like(ahead, dtype=torch.bool)
        return seen if self.window is None else seen & (ahead.abs() < self.window)


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What happens to the products of queries and keys before the softmax, in this order.

    scale    they are multiplied by it
    softcap  then softcap * tanh(score / softcap) (Gemma 2)
    bias     `[1 or batch, 1 or heads, queries, keys]`, added
    slopes   `[heads]`, ALiBi: -slope * |q - k| is added
    sinks    `[heads]`, one more logit in the softmax's denominator, dropped afterwards (GPT-OSS)
    """

    scale: float
    softcap: float | None = None
    bias: Tensor | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None

    def features(self) -> frozenset[Feature]:
        """What these scores want of a backend."""
        wanted: dict[Feature, Any] = {
            "softcap": self.softcap, "bias": self.bias, "alibi": self.slopes, "sinks": self.sinks,
        }  # fmt: skip
        return frozenset(name for name, value in wanted.items() if value is not None)

    def distance(self, query: Tensor, key: Tensor) -> Tensor | None:
        """ALiBi's part `[..., heads, queries, keys]` (fp32) for positions `[..., queries]` and
        `[..., keys]`."""
        if self.slopes is None:
            return None
        far = (key.unsqueeze(-2) - query.unsqueeze(-1)).abs().unsqueeze(-3)
        return -self.slopes.float()[:, None, None] * far


def learned(function: Callable[..., Any], window: int | None) -> Visibility | None:
    """The `Visibility` that a mask function of transformers (batch, head, query, key) has; None
    for a pattern that is none, as attention in chunks.

    `window` is what the function's maker was told, if anything: it says how far one must look.
    """
    size = max(64, 2 * window + 3) if window else SEEN
    query = torch.tensor([0, 1, size // 2, size // 2 + 1, size - 1])
    key, zero = torch.arange(size), torch.zeros(1, 1, dtype=torch.int64)
    try:
        seen = function(zero, zero, query.unsqueeze(1), key.unsqueeze(0))
    except IndexError:  # it looks into a tensor of this batch: no rule of positions alone
        return None
    seen = torch.as_tensor(seen).reshape(-1, seen.shape[-1]).expand(len(query), size)
    causal = not bool(seen[0, 1:].any())
    behind = int(seen[-1].sum())
    found = Visibility(causal, behind if behind < size else None)
    return found if bool((seen == found.of(query, key)).all()) else None
