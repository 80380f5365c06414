# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose weights are laid out for the CPU's matrix units once, by oneDNN.

torch's own linear lays them out again in each call, or hands fp32 to a library that leaves half of
some CPUs idle (measured on AMD: 2.2 times slower). The arithmetic stays the dtype's own.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from headswap.spyre.learning import FAILURES, numbers, probe_rows, same
from headswap.spyre.packs import run_texts
from headswap.spyre.prepare import PassReport, Prepared

Replaced = tuple[nn.Module, str, nn.Module]
LAID_OUT_FOR = 256
"""Tokens that the layout is chosen for; other counts run as well."""


def lay_out(made: Prepared, packs: bool) -> None:
    """Pack what runs in the backbone's dtype: of a classifier the backbone, of a causal language
    model all of it. A classifier's head runs in fp32 and stays. Where the model then gives other
    numbers, or needs a weight itself, nothing is packed. It is compared as it will run, in `packs`
    or padded.
    """
    whole = made.backbone if made.head_spec is not None else made.model
    rows = probe_rows(made.model.config)
    replaced: list[Replaced] = []

    def run() -> Tensor:
        return run_texts(made, rows) if packs else numbers(made.model, rows, made.pad)

    try:
        with torch.no_grad():
            before = run()
            replaced = pack_linears(whole, _of_head(made))
            kept = same(run(), before, made.dtype)
    except FAILURES:
        kept = False
    if not kept:
        for module, name, child in replaced:
            setattr(module, name, child)
    count = len({id(child) for _, _, child in replaced}) if kept else 0
    made.reports.append(PassReport("linears", f"{count} weights in oneDNN's layout"))


def _of_head(made: Prepared) -> list[nn.Module]:
    """Layers that run on the pooled rows alone, in a head's dtype; some lie in the backbone."""
    spec = made.head_spec
    paths = [] if spec is None else [layer.path for layer in spec.stored]
    found = [made.model.get_submodule(path) for path in paths]
    pooler = getattr(made.backbone, "pooler", None)
    return found + (list(pooler.modules()) if isinstance(pooler, nn.Module) else [])


class PackedLinear(nn.Module):
    """`nn.Linear` with its weight in oneDNN's layout; `weight` is the plain one, which some layers
    read themselves (a router that multiplies in fp32, Mamba's step sizes)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), LAID_OUT_FOR)
        self.bias = None if bias is None else bias.detach()
        self.weight = weight.new_empty(0)  # some classes ask for its dtype; there is no more to it

    def forward(self, states: Tensor) -> Tensor:
        """`[..., in_features]` -> `[..., out_features]`."""
        found: Tensor = torch.ops.mkldnn._linear_pointwise(
            states, self.packed, self.bias, "none", [], ""
        )
        return found


def pack_linears(backbone: nn.Module, spared: Collection[nn.Module] = ()) -> list[Replaced]:
    """Replace every plain `nn.Linear` of `backbone` (a copy that nobody trains) by a packed one;
    returns where, and what stood there. Layers with hooks, adapters or other weights stay, and
    those in `spared`."""
    if not usable():
        return []
    made: dict[int, PackedLinear] = {}
    replaced: list[Replaced] = []
    for module in list(backbone.modules()):
        for name, child in list(module.named_children()):
            if _plain(child) and child not in spared:
                if id(child) not in made:
                    made[id(child)] = PackedLinear(child.weight, child.bias)
                setattr(module, name, made[id(child)])
                replaced.append((module, name, child))
    return replaced


def usable() -> bool:
    """Whether this torch has oneDNN's layouts."""
    onednn: Any = torch.backends.mkldnn
    return bool(onednn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    return (
        type(module) is nn.Linear
        and "forward" not in vars(module)  # somebody put another in its place
        and type(module.weight.data) is Tensor
        and module.weight.device.type == "cpu"
        and module.weight.dtype in (torch.float32, torch.bfloat16)
        and module.weight.numel() > 0
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )
