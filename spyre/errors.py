# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a device or with the shapes that are to run on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headswap.registry.errors import HeadswapError

if TYPE_CHECKING:
    from headswap.spyre.findings import RuleReport


class DeviceError(HeadswapError, ValueError):
    """A device description that no card has, or an environment that comes too late.

    `variables` gives for each variable what torch_sendnn read and what was asked.
    """

    variables: Mapping[str, tuple[str | None, str]] = {}


class ShapeError(HeadswapError, ValueError):
    """A shape that the device refuses, or rows that fit no declared shape.

    `rows` are the offending rows' indices, `value` and `limit` the two numbers that clash.
    """

    rows: tuple[int, ...] = ()
    value: int | None = None
    limit: int | None = None


class CapacityError(HeadswapError, ValueError):
    """More blocks were asked for than there are; `needed` and `free` are the two numbers."""

    needed: int = 0
    free: int = 0


class AttentionError(HeadswapError, ValueError):
    """An attention backend that nobody registered, or that cannot do what a model's layers want.

    `name` is the backend, `features` what it lacks.
    """

    name: str = ""
    features: tuple[str, ...] = ()


class CompileError(HeadswapError, RuntimeError):
    """A graph that cannot be compiled, or that would be compiled after warm-up, for `shape`."""

    shape: str = ""


class NonFiniteError(HeadswapError, ValueError):
    """Rows whose result is not finite; `rows` are their indices, `values` what all rows gave, of
    which the others' are good."""

    rows: tuple[int, ...] = ()
    values: object = None


class RuleError(HeadswapError, ValueError):
    """A graph or its inputs break the device's rules; `report` is the whole `RuleReport`."""

    report: RuleReport


class RuleWarning(UserWarning):
    """A graph or its inputs break the device's rules, and were to run all the same."""
