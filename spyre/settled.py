# SPDX-License-Identifier: Apache-2.0
"""Backbones that change themselves in a run, put back before each.

BigBird turns to full attention for a short text and stays there: a long one gives other numbers
afterwards. Which modules do so is seen in the runs that an executor learns from.
"""

from __future__ import annotations

from typing import Any

from torch import nn

PLAIN = (str, bool)
"""Values by which modules switch between ways; numbers are counters and bounds, which RoPE keeps
together with its frequencies."""


class Settled:
    """How `module` and those in it stand now."""

    def __init__(self, module: nn.Module) -> None:
        self._held = [(each, _values(each), dict(each._modules)) for each in module.modules()]
        self._changed: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = []

    def look(self) -> bool:
        """Remember what changed since, for `restore`, and forget the rest; whether anything did."""
        self._changed = [
            held for held in self._held if (_values(held[0]), held[0]._modules) != held[1:]
        ]
        self._held = []
        return bool(self._changed)

    def restore(self) -> None:
        """Put back what was seen to change."""
        for module, values, children in self._changed or self._held:
            vars(module).update(values)
            module._modules.update(children)


def _values(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, PLAIN)}
