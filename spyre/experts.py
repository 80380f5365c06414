# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts without a choice: every expert on every token, weighted by the router.

transformers runs the experts that tokens chose, which depends on values: 4.57 loops over them,
which is no single graph, and 5 sorts tokens by expert, with integers that the card lacks. An expert
that a token did not choose has the weight zero there, so the sum is the same. It costs the experts
that nobody chose, and where one of those overflows in low precision, its row is not finite, and is
named.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headswap.spyre.learning import FAILURES, numbers, probe_rows, same
from headswap.spyre.prepare import PassReport, Prepared

Sum = Callable[..., Any]
GATED = frozenset(("gate", "experts", "shared_expert", "shared_expert_gate"))
"""Parts of a block that softmaxes a linear gate; a block with others computes something else."""


class AllExperts(nn.Module):
    """Stands where a mixture stood, around it. A module and no method of the mixture, which would
    bind its layer: layers of one kind share a graph."""

    def __init__(self, own: nn.Module, total: Sum) -> None:
        super().__init__()
        self.own, self.total = own, total

    def forward(self, *given: Any, **named: Any) -> Any:
        """What `own` gives for the same arguments."""
        return self.total(self.own, *given, **named)


def run_all_experts(made: Prepared, *, sorted_too: bool) -> None:
    """Put the dense sum in the place of every mixture that is known here; where the model then
    gives other numbers, undo it. `sorted_too`: also of those that are a single graph as they are.
    """
    places = [
        (parent, name, child, total)
        for parent in list(made.backbone.modules())
        for name, child in parent.named_children()
        if (total := _total(parent, name, child, sorted_too)) is not None
    ]
    if not places:
        return
    rows = probe_rows(made.model.config)
    before = numbers(made.model, rows, made.pad)
    for parent, name, child, total in places:
        setattr(parent, name, AllExperts(child, total))
    try:
        kept = same(numbers(made.model, rows, made.pad), before, made.dtype)
    except FAILURES:
        kept = False
    for parent, name, child, _ in () if kept else places:
        setattr(parent, name, child)
    said = f"all of them on every token, in {len(places)} layers" if kept else "the backbone's own"
    made.reports.append(PassReport("experts", said))


def _total(parent: Any, name: str, module: Any, sorted_too: bool) -> Sum | None:
    """What gives the same sum as `module`, which runs chosen experts; None for other modules."""
    if hasattr(module, "has_gate") and hasattr(module, "down_proj"):  # transformers 5
        return _stacked if sorted_too and not module._is_expert_parallel else None
    if all(hasattr(module, part) for part in ("gate_up_proj_bias", "alpha", "limit")):
        return _gpt_oss
    if not isinstance(getattr(module, "experts", None), nn.ModuleList):
        return None
    children = {part for part, _ in module.named_children()}
    plain = children <= GATED and isinstance(getattr(module, "gate", None), nn.Linear)
    if plain and hasattr(module, "top_k"):
        return _gated
    return _routed if hasattr(module, "moe") else None


def _spread(index: Tensor, weights: Tensor, experts: int) -> Tensor:
    """`weights` `[tokens, chosen]` of the experts `index` (int64, same shape) as
    `[experts, tokens, 1]`, zero for the others."""
    zeros = torch.zeros(len(weights), experts, dtype=weights.dtype, device=weights.device)
    return zeros.scatter(1, index, weights).t().unsqueeze(-1)


def _listed(module: Any, states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Experts that are modules: `states` `[tokens, hidden]` -> the same."""
    shares = _spread(index, weights, len(module.experts)).unbind(0)
    found = torch.zeros_like(states, dtype=weights.dtype)
    for expert, share in zip(module.experts, shares, strict=True):
        found = found + expert(states) * share
    return found.to(states.dtype)


def _routed(module: Any, hidden: Tensor) -> Tensor:
    """DeepSeek V3's block and its kin, whose router is a module that picks the experts."""
    index, weights = module.gate(hidden)
    states = hidden.reshape(-1, hidden.shape[-1])
    found = _listed(module, states, index, weights).reshape(hidden.shape)
    return found + module.shared_experts(hidden) if hasattr(module, "shared_experts") else found


def _gated(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Mixtral's block and its kin: `[batch, length, hidden]` -> the same, and the gate's logits."""
    states = hidden.reshape(-1, hidden.shape[-1])
    logits = module.gate(states)
    weights, index = logits.softmax(dim=1, dtype=torch.float32).topk(module.top_k, dim=-1)
    if getattr(module, "norm_topk_prob", True):
        weights = weights / weights.sum(dim=-1, keepdim=True)
    found = _listed(module, states, index, weights.to(states.dtype))
    if hasattr(module, "shared_expert"):
        share = module.shared_expert_gate(states).sigmoid()
        found = found + share * module.shared_expert(states)
    return found.reshape(hidden.shape), logits


def _stacked(module: Any, states: Tensor, *given: Tensor, **named: Tensor) -> Tensor:
    """transformers 5: stacked weights, `states` `[tokens, hidden]`, index and weights
    `[tokens, chosen]`."""
    index, weights = (*given, *named.values())
    inner = _product(module, "gate_up_proj" if module.has_gate else "up_proj", states)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    found = _product(module, "down_proj", inner)
    if module.has_post_expert_norm:
        found = module.post_expert_norm(found)
    return (found * _spread(index, weights, len(found))).sum(dim=0).to(states.dtype)


def _product(module: Any, name: str, states: Tensor) -> Tensor:
    """`[tokens, in]` or `[experts, tokens, in]` -> `[experts, tokens, out]`."""
    weight = getattr(module, name)
    found = torch.matmul(states, weight if module.is_transposed else weight.transpose(1, 2))
    return found + getattr(module, f"{name}_bias").unsqueeze(1) if module.has_bias else found


def _gpt_oss(module: Any, hidden: Tensor, *given: Tensor, **named: Tensor) -> Tensor:
    """4.57's GPT-OSS: the router gives weights `[tokens, experts]`, zeros among them."""
    _, weights = (*given, *named.values())
    states = hidden.reshape(-1, hidden.shape[-1])
    inner = torch.matmul(states, module.gate_up_proj) + module.gate_up_proj_bias.unsqueeze(1)
    gate = inner[..., ::2].clamp(max=module.limit)
    up = inner[..., 1::2].clamp(min=-module.limit, max=module.limit)
    gated = (up + 1) * gate * torch.sigmoid(gate * module.alpha)
    found: Tensor = torch.matmul(gated, module.down_proj) + module.down_proj_bias.unsqueeze(1)
    return (found * weights.t().unsqueeze(-1)).sum(dim=0).reshape(hidden.shape)
