# SPDX-License-Identifier: Apache-2.0
"""Models under the card's rules: executor, attention, pages, shapes; usable without the card.

What needs torch is loaded when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

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
from headswap.spyre.errors import (
    AttentionError,
    CapacityError,
    CompileError,
    DeviceError,
    NonFiniteError,
    RuleError,
    RuleWarning,
    ShapeError,
)
from headswap.spyre.findings import Finding, RuleReport
from headswap.spyre.op_policy import OP_POLICY, OpPolicy, op_policy
from headswap.spyre.pool import BlockPool, Lease, Usage
from headswap.spyre.rules import RULES, RULES_VERSION, Rule
from headswap.spyre.shapes import (
    Assignment,
    Run,
    Shape,
    ShapePlan,
    cost,
    ladder_geometric,
    ladder_pow2,
)

if TYPE_CHECKING:
    from headswap.spyre.backends import ATTENTION, AttentionBackend, AttentionBackends
    from headswap.spyre.checker import RulesBackend, check_graph, check_inputs
    from headswap.spyre.executor import Executor
    from headswap.spyre.traced import Input

_LAZY = {
    "ATTENTION": "headswap.spyre.backends",
    "AttentionBackend": "headswap.spyre.backends",
    "AttentionBackends": "headswap.spyre.backends",
    "Executor": "headswap.spyre.executor",
    "Input": "headswap.spyre.traced",
    "RulesBackend": "headswap.spyre.checker",
    "check_graph": "headswap.spyre.checker",
    "check_inputs": "headswap.spyre.checker",
}

__all__ = [
    "ATTENTION",
    "DIALECTS",
    "OP_POLICY",
    "RULES",
    "RULES_VERSION",
    "SENDNN",
    "SPYRE",
    "Assignment",
    "AttentionBackend",
    "AttentionBackends",
    "AttentionError",
    "BlockPool",
    "CapacityError",
    "CompileError",
    "DeviceError",
    "DeviceSpec",
    "Dialect",
    "Executor",
    "Finding",
    "Input",
    "Lease",
    "NonFiniteError",
    "OpPolicy",
    "Rule",
    "RuleError",
    "RuleReport",
    "RuleWarning",
    "RulesBackend",
    "Run",
    "Shape",
    "ShapeError",
    "ShapePlan",
    "Stack",
    "Usage",
    "applied",
    "check_graph",
    "check_inputs",
    "cost",
    "detect",
    "environment",
    "ladder_geometric",
    "ladder_pow2",
    "op_policy",
]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
