# SPDX-License-Identifier: Apache-2.0
"""Masks, made on the host: additive, finite, for either side of padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headswap.spyre.device import PadSide


def hidden_score(dtype: torch.dtype) -> float:
    """What is added to the score of a key that is not seen.

    Half the lowest number: with a score on top it stays finite, and two of them do too. Infinity
    is no number to the card (hf-adapters: -inf becomes a finite one there, and inf - inf is NaN).
    """
    return torch.finfo(dtype).min / 2


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `seen` (bool, `[..., queries, keys]`), else `hidden_score(dtype)`.

    A query that sees nothing (a pad) gets equal scores, so its state is finite; nobody reads it.
    """
    hidden = torch.full((), hidden_score(dtype), dtype=dtype, device=seen.device)
    shown = torch.zeros((), dtype=dtype, device=seen.device)
    empty = ~seen.any(dim=-1, keepdim=True)
    return torch.where(seen | empty, shown, hidden)


def real_tokens(lengths: Sequence[int], length: int, side: PadSide) -> Tensor:
    """Which of `length` positions of each row are tokens, bool `[batch, length]`."""
    counts = torch.tensor(list(lengths), dtype=torch.int64).unsqueeze(1)
    places = torch.arange(length).unsqueeze(0)
    return places < counts if side == "right" else places >= length - counts
