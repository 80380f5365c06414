# SPDX-License-Identifier: Apache-2.0
"""What each run hands to its graphs, looked at on the host against the card's rules.

A graph is checked once, when it is compiled; sizes, storage and values of its inputs come anew with
each run. It costs one pass over the mask.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from headswap.spyre.checker import check_inputs, summary
from headswap.spyre.device import DeviceSpec
from headswap.spyre.errors import RuleError, RuleWarning
from headswap.spyre.findings import RuleReport


class InputGuard:
    """Checks inputs by the rules of `spec`; `rules` is what becomes of a finding: "raise" (errors),
    "warn" or "record". What was found, each kind once, is in `report`."""

    def __init__(self, spec: DeviceSpec, rules: str) -> None:
        self.spec, self.rules = spec, rules
        self.report = RuleReport()

    def __call__(self, inputs: Mapping[str, Tensor]) -> None:
        """Raise `RuleError` or warn, as asked."""
        found = check_inputs(inputs, self.spec)
        if found.clean:
            return
        known = {finding.message for finding in self.report.findings}
        self.report += RuleReport(f for f in found.findings if f.message not in known)
        if self.rules == "raise" and found.errors:
            raise RuleError(summary(found, self.spec, "The inputs of a run break"), report=found)
        if self.rules == "warn":
            message = summary(found, self.spec, "The inputs of a run break")
            warnings.warn(message, RuleWarning, stacklevel=2)


def looked_at(
    layer: nn.Module, run: Callable[..., Any], guard: InputGuard, wanted: Callable[[], bool]
) -> Callable[..., Any]:
    """`run`, which runs `layer`, with its arguments handed to `guard` first where `wanted`."""
    names = [name for name in inspect.signature(type(layer).forward).parameters if name != "self"]

    def first_look(*given: Any, **named: Any) -> Any:
        if wanted():
            places = [*zip(names, given, strict=False), *named.items()]
            guard({name: t for place, value in places for name, t in _floats(place, value)})
        return run(*given, **named)

    return first_look


def _floats(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of numbers in an argument; integers stay on the host, and a mask of no size says
    that a batch goes in its place."""
    if isinstance(value, tuple):
        for i, each in enumerate(value):
            yield from _floats(f"{name}_{i}", each)
    elif isinstance(value, Tensor) and value.is_floating_point() and value.numel():
        yield name, value
