# SPDX-License-Identifier: Apache-2.0
"""RMS norms over a head (Qwen3, Gemma 3), kept as they are when the head is padded with zeros.

The mean of squares over D' places, D' - D of them zero, is D / D' times the one over D. With
eps' = eps D / D' the root is sqrt(D / D') times as large, and with a weight sqrt(D / D') times as
large the norm is the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headswap.spyre.learning import FAILURES, same

EPSILONS = ("variance_epsilon", "eps")


def added_one(norm: Any, dim: int) -> int | None:
    """What `norm` adds to its weight (0, or 1 as Gemma does), found by running it; None for a
    module that is no RMS norm over `dim` numbers."""
    eps = next((getattr(norm, name) for name in EPSILONS if hasattr(norm, name)), None)
    weight = getattr(norm, "weight", None)
    if not isinstance(eps, float) or weight is None or tuple(weight.shape) != (dim,):
        return None
    states = torch.randn(3, dim, generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    plain = states.float() * torch.rsqrt(states.float().pow(2).mean(-1, keepdim=True) + eps)
    try:
        found = norm(states)
    except FAILURES:
        return None
    wanted = (one for one in (0, 1) if same(found.float(), plain * (weight.float() + one),
                                            weight.dtype))  # fmt: skip
    return next(wanted, None)


def head_norms(module: nn.Module, dim: int) -> dict[str, int]:
    """The norms over one head among `module`'s children, by name, with what each adds."""
    found = {name: added_one(child, dim) for name, child in module.named_children()}
    return {name: one for name, one in found.items() if one is not None}


@torch.no_grad()
def widen_norm(norm: Any, one: int, dim: int, more: int, widen: Any) -> None:
    """Pad the weight of `norm` by `more`, where `widen` puts zeros as it does in the head."""
    share = dim / (dim + more)
    scaled = (norm.weight.float() + one) * share**0.5 - one
    norm.weight = nn.Parameter(widen(scaled).to(norm.weight.dtype), requires_grad=False)
    for name in EPSILONS:
        if hasattr(norm, name):
            setattr(norm, name, getattr(norm, name) * share)
