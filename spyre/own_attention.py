# SPDX-License-Identifier: Apache-2.0
"""Backbones that compute their own attention, made to do it in one way whatever the batch.

Without pads transformers drops an encoder's mask and takes another branch, which would be a second
graph for the same rectangle. Plain operators keep the mask, and they are what the card's compiler
wants (sendnn-inference loads encoders with eager attention). 4.57 makes the choice by class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headswap.spyre.compiling import outer_layers
from headswap.spyre.hook import configs, install
from headswap.spyre.learning import FAILURES, numbers, padded_batch, probe_rows, same
from headswap.spyre.prepare import PassReport, Prepared

KERNEL = "Sdpa"
"""What 4.57 has in the names of attention classes that call torch's kernel; each derives from the
class of plain operators, with the same weights."""
Undo = Callable[[], None]


def always_masked(made: Prepared) -> None:
    """Have every layer given a mask, also by a batch without pads. Attention that comes to us is
    left alone: our mask function drops none."""
    if made.layers:
        return
    before, said = _seen(made), "by the backbone's own rule"
    for name, change in (("plain operators", _plain), ("plain operators, our mask", _our_masks)):
        undo = change(made)
        try:
            found, steady = _seen(made)
            kept = same(found, before[0], made.dtype) and (steady or not before[1])
        except FAILURES:
            kept, steady = False, False
        if not kept:
            undo()
            continue
        said = f"{name}; {'one for every batch' if steady else 'none for a batch without pads'}"
        if steady:
            break
    made.reports.append(PassReport("masks", said))


@torch.no_grad()
def _seen(made: Prepared) -> tuple[Tensor, bool]:
    """The model's numbers for rows alone and, where it can be padded, together; and whether its
    layers were given tensors in the same places both times."""
    rows, given = probe_rows(made.model.config), []

    def note(module: Any, arguments: Any, keywords: dict[str, Any]) -> None:
        places = [*enumerate(arguments), *keywords.items()]
        given.append((id(module), [name for name, value in places if isinstance(value, Tensor)]))

    handles = [
        layer.register_forward_pre_hook(note, with_kwargs=True)
        for layer in outer_layers(made.backbone)
    ]
    try:
        found = [numbers(made.model, rows[:1], made.pad)]
        alone, given = given, []
        if made.padded:
            output = made.model(**padded_batch(rows, made.pad))
            values = output.logits if "logits" in output else output.pooler_output
            found.append(values.flatten(0, -2))
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat(found), alone == given or not made.padded


def _plain(made: Prepared) -> Undo:
    modules: list[Any] = list(made.backbone.modules())
    before = [(module, dict(vars(module)), type(module)) for module in modules]
    names = [(config, vars(config).get("_attn_implementation_internal"))
             for config in configs(made.backbone)]  # fmt: skip
    for config, _ in names:
        config._attn_implementation_internal = "eager"
    for module, own, kind in before:
        if KERNEL in kind.__name__:
            module.__class__ = kind.__mro__[1]
        if isinstance(own.get("attn_implementation"), str):
            module.attn_implementation = "eager"

    def undo() -> None:
        for config, name in names:
            config._attn_implementation_internal = name
        for module, own, kind in before:
            module.__class__ = kind
            if "attn_implementation" in own:
                module.attn_implementation = own["attn_implementation"]

    return undo


def _our_masks(made: Prepared) -> Undo:
    """Our mask function, whose name goes with an attention that these layers do not ask for."""
    undo = _plain(made)
    install(made.backbone, "native")
    return undo
