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
from headswap.spyre.errors import CapacityError, DeviceError, ShapeError
from headswap.spyre.pool import BlockPool, Lease, Usage
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
    "BlockPool",
    "CapacityError",
    "DeviceError",
    "DeviceSpec",
    "Dialect",
    "Lease",
    "Run",
    "Shape",
    "ShapeError",
    "ShapePlan",
    "Stack",
    "Usage",
    "applied",
    "cost",
    "detect",
    "environment",
    "ladder_geometric",
    "ladder_pow2",
]
