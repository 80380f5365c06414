# SPDX-License-Identifier: Apache-2.0
"""What becomes of every tensor, and what of that is a fault."""

from __future__ import annotations

from typing import Any

from headswap.convert.checkpoint import Checkpoint
from headswap.convert.drops import drop_reason
from headswap.convert.loading import LoadingInfo
from headswap.convert.plan import Action, TensorPlan

MOST = 6
"""Tensors that a plan's problems name one by one."""


def account(checkpoint: Checkpoint, model: Any, info: LoadingInfo) -> list[TensorPlan]:
    """What becomes of every stored tensor of `checkpoint`, and which ones `model` still lacks."""
    needed = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    wrong = {name for name, _, _ in info.mismatched}
    found = []
    for name, (shape, _) in sorted(checkpoint.headers.items()):
        if name in info.unexpected:
            reason = drop_reason(name, type(model))
            action: Action = "dropped" if reason else "unexpected"
            found.append(TensorPlan(name, action, shape, reason or "no place for it"))
        elif name not in wrong:
            found.append(TensorPlan(name, "used" if name in needed else "renamed", shape))
    found = checkpoint.stacks.as_stored(found, checkpoint.plain)
    if checkpoint.quantised is not None:
        found = checkpoint.quantised.as_stored(found, checkpoint.stored)
    for name in info.missing:
        found.append(TensorPlan(name, "missing", needed.get(name, ()), "not in the checkpoint"))
    for name, stored, wanted in info.mismatched:
        reason = f"the class needs {list(wanted)}"
        shape = stored or checkpoint.headers.get(name, ((), None))[0]
        found.append(TensorPlan(name, "mismatched", shape, reason))
    return found


def problems_of(tensors: list[TensorPlan], head: set[str], allow_untrained: bool) -> list[str]:
    bad = [t for t in tensors if t.action in ("missing", "unexpected", "mismatched")]
    headless = [t for t in bad if t.action == "missing" and t.name in head]
    if allow_untrained:
        bad = [t for t in bad if t not in headless]
    problems = [f"{t.action}: {t.name} ({t.reason})" for t in bad[:MOST]]
    if len(bad) > MOST:
        problems.append(f"and {len(bad) - MOST} more tensors")
    if headless and not allow_untrained:
        problems.append(
            "give label_tokens to make the head from output rows, or allow_untrained_head=True"
        )
    return problems
