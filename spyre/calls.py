# SPDX-License-Identifier: Apache-2.0
"""Which linear layers a model calls on the same states, and which activations follow one: seen in a
run, no list of families."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from headswap.spyre.learning import FAILURES
from headswap.spyre.products import ACTIVATIONS, Activation

Found = TypeVar("Found")


class Calls:
    """The calls of `layers`, and of modules below `root` that have nothing to learn, in one run.

    Tensors are held, so that none takes another's identity.
    """

    def __init__(self, root: nn.Module, layers: Collection[nn.Linear]) -> None:
        self._root, self._layers = root, set(layers)
        self._linear: list[tuple[nn.Linear, Tensor, Tensor]] = []
        self._other: list[tuple[nn.Module, Tensor]] = []

    def during(self, run: Callable[[], Found]) -> Found:
        """What `run` gives, whose calls are seen."""
        handles = [
            module.register_forward_hook(self._see)
            for module in self._root.modules() if module in self._layers or _bare(module)
        ]  # fmt: skip
        try:
            return run()
        finally:
            for handle in handles:
                handle.remove()

    def _see(self, module: Any, given: Any, output: Any) -> None:
        if len(given) != 1 or not isinstance(given[0], Tensor) or not isinstance(output, Tensor):
            return
        if module in self._layers:
            self._linear.append((module, given[0], output))
        else:
            self._other.append((module, given[0]))

    def activated(self) -> dict[nn.Linear, tuple[nn.Module, Activation]]:
        """Layers with the one activation behind them, which follows nothing else.

        Both stand once in the model, side by side: an activation that several layers share may
        follow one that this run did not call (an expert).
        """
        made_by = {id(output): layer for layer, _, output in self._linear}
        follows: dict[nn.Module, list[nn.Linear | None]] = {}
        for module, given in self._other:
            follows.setdefault(module, []).append(made_by.get(id(given)))
        called = Counter(layer for layer, _, _ in self._linear)
        homes = _homes(self._root)
        found = {}
        for module, before in follows.items():
            layer = before[0]
            if layer is None or {*before} != {layer} or len(before) != called[layer]:
                continue
            if len(homes[module]) != 1 or homes[module] != homes[layer] or layer in found:
                continue
            activation = _known(module)
            if activation is not None:
                found[layer] = (module, activation)
        return found

    def together(self, spared: Collection[nn.Linear]) -> Iterator[list[nn.Linear]]:
        """Groups of layers that are always called on the same states, without those in `spared`."""
        on: dict[int, list[nn.Linear]] = {}
        for layer, given, _ in self._linear:
            if layer not in spared:
                on.setdefault(id(given), []).append(layer)
        seen: dict[nn.Linear, set[tuple[nn.Linear, ...]]] = {}
        for group in on.values():
            for layer in group:
                seen.setdefault(layer, set()).add(tuple(group))
        for joint in dict.fromkeys(tuple(group) for group in on.values()):
            alike = len({layer.weight.dtype for layer in joint}) == 1
            if len(joint) > 1 and alike and all(seen[layer] == {joint} for layer in joint):
                yield list(joint)


def _bare(module: nn.Module) -> bool:
    """Whether `module` holds nothing (no modules, no tensors) and nobody watches or changes it."""
    holds = module._modules or module._parameters or module._buffers
    return not (holds or module._forward_hooks or module._forward_pre_hooks
                or "forward" in vars(module))  # fmt: skip


def _homes(root: nn.Module) -> dict[nn.Module, list[int]]:
    """The modules that hold each module below `root`, by their ids."""
    found: dict[nn.Module, list[int]] = {}
    for parent in root.modules():
        for child in parent._modules.values():
            if child is not None:
                found.setdefault(child, []).append(id(parent))
    return found


def _known(module: nn.Module) -> Activation | None:
    """oneDNN's name for what `module` computes, by its values."""
    given = torch.cat([torch.linspace(-end, end, 2001) for end in (0.1, 12.0, 1e4)])
    try:
        found = module(given)
    except FAILURES:
        return None
    for name, function in ACTIVATIONS.items():
        if found.shape == given.shape and torch.allclose(found, function(given), 1e-6, 1e-6):
            return name
    return None
