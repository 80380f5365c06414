# SPDX-License-Identifier: Apache-2.0
"""Whether a model's weights are what they were when an executor was made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headswap.spyre.errors import DeviceError

ADAPTERS = ("_disable_adapters", "_active_adapter")
"""Where peft keeps, in each layer, whether its adapters run and which."""


def _few(weight: nn.Parameter) -> Tensor:
    """A view of some numbers of a weight, spread over it."""
    flat = weight.detach().reshape(-1)
    return flat[:: max(1, len(flat) // 8)]


def _where(weight: Tensor) -> int:
    """Where a weight lies: `weight.data = other` moves neither its id nor its counter."""
    return weight.data_ptr() if type(weight) is nn.Parameter else 0


class Weights:
    """A model's weights as they were: laid-out copies and cached keys were made of them."""

    def __init__(self, model: nn.Module) -> None:
        self._model, modules = model, list(model.modules())
        # Their own tables, not `parameters()`, which walks the tree: every call looks at them.
        self._tables = [(module._modules, module._parameters) for module in modules]
        self._seen = self._now()
        self._adapted = [module for module in modules if hasattr(module, ADAPTERS[0])]
        self._switches = self._switched()
        # What writes past the counter of versions (a fused optimizer, `.data`) changes all of a
        # weight, so a few numbers of each tell.
        self._few = [_few(p) for p in model.parameters() if p.device.type == "cpu"]
        self._held = self._sampled()

    def _now(self) -> list[int]:
        """What stands in each module, and how often its weights were written to."""
        found: list[int] = []
        for modules, weights in self._tables:
            found.extend(map(id, modules.values()))
            for p in weights.values():
                if p is not None:
                    found += (id(p), _where(p), 0 if p.is_inference() else p._version)
        return found

    def _switched(self) -> list[Any]:
        return [str(getattr(m, name)) for m in self._adapted for name in ADAPTERS]

    def _sampled(self) -> Tensor:
        return torch.cat(self._few).nan_to_num() if self._few else torch.empty(0)

    def refuse_change(self) -> None:
        """Raise `DeviceError` where a weight was written to or replaced since, a module was
        replaced, or an adapter was switched."""
        same = self._now() == self._seen and self._switched() == self._switches
        if not same or not torch.equal(self._sampled(), self._held):
            raise DeviceError(
                f"The weights of {type(self._model).__name__} changed after its executor was made, "
                "which holds some of them in another layout. Make a new Executor."
            )
