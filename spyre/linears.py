# SPDX-License-Identifier: Apache-2.0
"""A model's linear layers in oneDNN's layout; see `products` for what that gains."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from headswap.spyre.calls import Calls
from headswap.spyre.errors import DeviceError
from headswap.spyre.learning import FAILURES, numbers, probe_rows, same
from headswap.spyre.packs import run_texts
from headswap.spyre.prepare import PassReport, Prepared
from headswap.spyre.products import NONE, Int8Linear, LaidLinear, PackedLinear, joined, usable

MEASURED = 2**25
"""Numbers of weights whose products are timed: more than caches hold, and some milliseconds."""
ROUNDS = 5


def lay_out(made: Prepared, packs: bool) -> None:
    """Lay out what runs in the backbone's dtype: of a classifier the backbone, of a causal language
    model all of it. A classifier's head runs in fp32 and stays. Where the model then gives other
    numbers, or needs a weight itself, nothing is laid out. It is compared as it will run, in
    `packs` or padded.
    """
    whole = made.backbone if made.head_spec is not None else made.model
    layers = _layers(made, whole) if usable() else []
    if not layers:
        made.reports.append(PassReport("linears", _said({})))
        return
    run = _run(made, packs)
    laid: dict[nn.Module, nn.Module] = {}
    try:
        with torch.no_grad():
            calls = Calls(whole, layers)
            before = calls.during(run)
            laid = _laid(layers, calls)
            _put(whole, laid)
            kept = same(run(), before, made.dtype)
    except FAILURES:
        kept = False
    if not kept:
        _put(whole, {new: old for old, new in laid.items()})
        laid = {}
    elif made.head_spec is None:  # decodes a token at a time
        _keep_plain({m: laid[m] for m in layers})
    made.reports.append(PassReport("linears", _said(laid)))


def lay_out_int8(made: Prepared, packs: bool) -> None:
    """Let the backbone's layers multiply in int8, and say what that costs of a few rows' numbers.

    Raises `DeviceError` where the backbone has no such layer or reads a weight itself: nobody who
    asks for int8 should get something else.
    """
    layers, run = _layers(made, made.backbone), _run(made, packs)
    if not layers:
        raise DeviceError(f"{type(made.backbone).__name__} has no linear layer for int8.")
    laid: dict[nn.Module, nn.Module] = {layer: Int8Linear(layer) for layer in layers}
    try:
        with torch.no_grad():
            before = run()
            _put(made.backbone, laid)
            found = run()
    except FAILURES as error:
        raise DeviceError(
            f"{type(made.backbone).__name__} cannot run with int8 layers ({error}). Leave "
            "dtype=torch.int8 out."
        ) from error
    off = float((found.float() - before.float()).norm() / before.float().norm())
    said = f"{len(laid)} weights in int8; numbers of three short rows are off by {off:.2%}"
    made.reports.append(PassReport("linears", said))


def _layers(made: Prepared, root: nn.Module) -> list[nn.Linear]:
    """The layers below `root` that may be laid out."""
    spared = _of_head(made)
    return [m for m in root.modules() if _plain(m) and m not in spared]


def _run(made: Prepared, packs: bool) -> Callable[[], Tensor]:
    """What compares: a few short rows' numbers."""
    rows = probe_rows(made.model.config)
    if packs:
        return lambda: run_texts(made, rows)
    return lambda: numbers(made.model, rows, made.pad)


def _laid(layers: Sequence[nn.Linear], calls: Calls) -> dict[nn.Module, nn.Module]:
    """What stands in the place of each of `layers`, and of activations that run with them.

    An activation saves more than a joint product: it is a pass over the widest states.
    """
    found: dict[nn.Module, nn.Module] = {}
    activated = calls.activated()
    for group in calls.together(activated):
        found.update(zip(group, joined(group), strict=True))
    for layer in layers:
        if layer in activated:
            module, activation = activated[layer]
            found[module] = nn.Identity()
            found[layer] = PackedLinear(layer, activation)
        elif layer not in found:
            found[layer] = PackedLinear(layer)
    return found


def _put(root: nn.Module, instead: dict[nn.Module, nn.Module]) -> None:
    """Put modules in the place of others below `root`, wherever those stand."""
    for parent in list(root.modules()):
        for name, child in list(parent.named_children()):
            if child in instead:
                setattr(parent, name, instead[child])


def _said(laid: dict[nn.Module, nn.Module]) -> str:
    layers = [m for m in laid.values() if isinstance(m, LaidLinear)]
    alone = [m for m in layers if isinstance(m, PackedLinear)]
    activated = sum(m.activation != NONE for m in alone)
    plain = sum(m.plain is not None for m in layers)
    said = f"{len(layers)} weights in oneDNN's layout, {len(layers) - len(alone)} of them joined, "
    return said + f"{activated} with their activation, {plain} plain for single tokens"


def _keep_plain(laid: dict[nn.Linear, Any]) -> None:
    """Let single tokens meet the plain weights (which the model that was given holds anyway) where
    this machine is faster so: oneDNN is on AMD, MKL on Intel."""
    some: list[nn.Linear] = []
    room = MEASURED
    for layer in laid:
        if not some or layer.weight.numel() <= room:
            some.append(layer)
            room -= layer.weight.numel()
    one = {m.in_features: m.weight.new_zeros(1, 1, m.in_features) for m in some}

    def plain() -> Any:
        return [nn.functional.linear(one[m.in_features], m.weight, m.bias) for m in some]

    if _faster(plain, lambda: [laid[m].laid(one[m.in_features]) for m in some]):
        for layer, new in laid.items():
            new.plain = layer.weight.detach()


def _faster(one: Callable[[], Any], other: Callable[[], Any]) -> bool:
    """Whether `one` takes less time than `other`, by medians of taking turns."""
    spent: dict[Callable[[], Any], list[float]] = {one: [], other: []}
    for _ in range(ROUNDS):
        for way, times in spent.items():
            start = time.perf_counter()
            way()
            times.append(time.perf_counter() - start)
    return statistics.median(spent[one]) < statistics.median(spent[other])


def _of_head(made: Prepared) -> list[nn.Module]:
    """Layers that run on the pooled rows alone, in a head's dtype; some lie in the backbone."""
    spec = made.head_spec
    paths = [] if spec is None else [layer.path for layer in spec.stored]
    found = [made.model.get_submodule(path) for path in paths]
    pooler = getattr(made.backbone, "pooler", None)
    return found + (list(pooler.modules()) if isinstance(pooler, nn.Module) else [])


def _plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether `module` is a linear layer that nobody watches, changes or stores otherwise."""
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
