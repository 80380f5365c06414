# SPDX-License-Identifier: Apache-2.0
"""Heads that a checkpoint stores as several linear layers, one a label, whose rows are one layer.

Such a head gives `[batch, labels]` by putting its layers' outputs side by side, which is what one
layer gives that has their rows one below the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TypeVar

import torch
from torch import Tensor

from headswap.convert.plan import TensorPlan
from headswap.convert.weights import Header
from headswap.heads import Dense, HeadSpec
from headswap.registry.errors import CheckpointError, WeightError

Value = TypeVar("Value")


@dataclass(frozen=True)
class Stacks:
    """Name of a tensor -> the stored ones whose rows it has, in their order."""

    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def headers(self, stored: Mapping[str, Header]) -> dict[str, Header]:
        """`stored` with each stacked tensor in the place of its parts."""
        made = {name: _header([stored[part] for part in parts])
                for name, parts in self.parts.items()}  # fmt: skip
        return {**self._others(stored), **made}

    def tensors(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same for the tensors themselves."""
        made = {name: torch.cat([stored[part] for part in parts])
                for name, parts in self.parts.items()}  # fmt: skip
        return {**self._others(stored), **made}

    def as_stored(self, plan: list[TensorPlan], stored: Mapping[str, Header]) -> list[TensorPlan]:
        """`plan` with the stored parts of each stacked tensor in its place."""
        found = []
        for tensor in plan:
            parts = self.parts.get(tensor.name)
            reason = f"{tensor.reason}; rows of {tensor.name}".removeprefix("; ")
            found += [tensor] if parts is None else [
                replace(tensor, name=part, shape=stored[part][0], reason=reason) for part in parts
            ]  # fmt: skip
        return found

    def _others(self, stored: Mapping[str, Value]) -> dict[str, Value]:
        parts = {part for parts in self.parts.values() for part in parts}
        return {name: value for name, value in stored.items() if name not in parts}


def stacks_of(spec: HeadSpec, headers: Mapping[str, Header], name: str) -> Stacks:
    """What the checkpoint `name` with `headers` stores in parts of the head `spec`.

    A layer that is stored whole, or of which there is no part, is none of them. Raises
    `WeightError` for a layer of which a part is missing, and `CheckpointError` for parts that don't
    fit together.
    """
    found: dict[str, tuple[str, ...]] = {}
    for layer in spec.dense:
        parts = _parts(layer, headers)
        _check_parts(layer, parts, headers, name)
        found |= parts
    return Stacks(found)


def _parts(layer: Dense, headers: Mapping[str, Header]) -> dict[str, tuple[str, ...]]:
    kinds = ("weight", "bias") if layer.bias else ("weight",)
    named = {f"{layer.path}.{kind}": tuple(f"{path}.{kind}" for path in layer.stacked)
             for kind in kinds}  # fmt: skip
    some = any(part in headers for parts in named.values() for part in parts)
    return named if some and headers.keys().isdisjoint(named) else {}


def _check_parts(
    layer: Dense, named: Mapping[str, tuple[str, ...]], headers: Mapping[str, Header], name: str
) -> None:
    missing = tuple(part for parts in named.values() for part in parts if part not in headers)
    if missing:
        raise WeightError(
            f"{name} stores no {', '.join(missing)}; {layer.path} is stacked from "
            f"{', '.join(layer.stacked)}, and all of them must be there.",
            missing=missing,
            unexpected=(),
        )
    for parts in named.values():
        shapes = {part: list(headers[part][0]) for part in parts}
        if any(not shape for shape in shapes.values()) or len({
            tuple(shape[1:]) for shape in shapes.values()
        }) > 1:  # fmt: skip
            raise CheckpointError(
                f"{name}: the rows of {shapes} can't stand one below the other.", path=name
            )


def _header(parts: list[Header]) -> Header:
    rows = sum(shape[0] for shape, _ in parts)
    return (rows, *parts[0][0][1:]), reduce(torch.promote_types, [dtype for _, dtype in parts])
