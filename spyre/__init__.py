# SPDX-License-Identifier: Apache-2.0
"""The device's rules and run shapes; usable on machines without the card."""

from headswap.spyre.device import (
    DIALECTS,
    SENDNN,
    SPYRE,
    DeviceSpec,
    Dialect,
    Stack,
    applied,
    detect,
    environment,
)
from headswap.spyre.errors import DeviceError, ShapeError
from headswap.spyre.shapes import (
    Assignment,
    Run,
    Shape,
    ShapePlan,
    cost,
    ladder_geometric,
    ladder_pow2,
)

__all__ = [
    "DIALECTS",
    "SENDNN",
    "SPYRE",
    "Assignment",
    "DeviceError",
    "DeviceSpec",
    "Dialect",
    "Run",
    "Shape",
    "ShapeError",
    "ShapePlan",
    "Stack",
    "applied",
    "cost",
    "detect",
    "environment",
    "ladder_geometric",
    "ladder_pow2",
]
