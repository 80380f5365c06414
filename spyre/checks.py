# SPDX-License-Identifier: Apache-2.0
"""The rules about dtypes, operators and constants of a graph, one function a rule.

Each takes a traced graph and a device, and yields findings; none changes anything. Other rules are
in `layout_checks.py`, `attention_checks.py` and `input_checks.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Node

from headswap.spyre.device import DeviceSpec
from headswap.spyre.findings import Finding
from headswap.spyre.op_policy import COPIES, FP32_OPS, VIEWS, names, op_policy
from headswap.spyre.rules import INTEGER_BUDGET, Severity
from headswap.spyre.traced import (
    MATMULS,
    Traced,
    at_node,
    dtype_name,
    is_integer,
    op_name,
    operand,
    overload,
    tensor_operand,
    through_views,
    value,
)

GraphCheck = Callable[[Traced, DeviceSpec], Iterator[Finding]]

_FILLS = names("ones zeros full new_ones empty_like ones_like zeros_like full_like")
_TURNS = frozenset({"sin", "cos"})
_ROW_PICKERS = MappingProxyType(
    {"embedding": (1, "indices"), "index_select": (2, "index"), "gather": (2, "index")}
)


def check_static(graph: Traced, spec: DeviceSpec) -> Iterator[Finding]:
    """R1: every size is a number. Paged decoders on sendnn are compiled for symbolic sizes."""
    paged = any("paged_attn" in op_name(n) for n in graph.calls)
    if paged and spec.dialect == "sendnn":
        return
    for node, made in graph.valued:
        if not all(isinstance(size, int) for size in made.shape):
            yield at_node(
                "R1",
                node,
                "a size is symbolic",
                "compile with dynamic=False, one graph a shape of the plan",
            )


def check_dtypes(graph: Traced, spec: DeviceSpec) -> Iterator[Finding]:
    """R6: the device's dtype; fp32 in `FP32_OPS` only."""
    for node, made in graph.valued:
        dtype = dtype_name(made.dtype)
        if (
            is_integer(made)
            or dtype == spec.dtype
            or not (made.dim() or node.op == "call_function")
        ):
            continue  # a number that was wrapped as a tensor has no dtype of its own
        name = op_name(node) if node.op == "call_function" else "an input"
        if dtype != "float32":
            yield at_node("R6", node, f"{name} is {dtype}", f"convert to {spec.dtype}")
        elif name in MATMULS:
            yield at_node(
                "R6",
                node,
                f"{name} multiplies matrices in float32",
                f"convert to {spec.dtype}, or compute it on the host",
            )
        elif name == "an input":
            yield at_node("R6", node, f"{name} is float32", f"convert to {spec.dtype}", "warning")
        elif not _computes_in_fp32(node):
            yield at_node(
                "R6", node, f"{name} does not compute in float32", f"convert to {spec.dtype} first"
            )


def _computes_in_fp32(node: Node) -> bool:
    name = op_name(node)
    if name == "getitem":
        return _computes_in_fp32(node.all_input_nodes[0])
    if name == "pow":  # decomposed into products and roots
        return operand(node, 1, "exponent") in (-1, -0.5, 0.5, 1, 2, 3)
    return name in FP32_OPS | VIEWS | COPIES | _FILLS


def check_integers(graph: Traced, spec: DeviceSpec) -> Iterator[Finding]:
    """R7: no int64 or bool results; views of index inputs are none. sendnn has a small budget.

    int32 sums and products are native (torch-spyre), and so are truth values that compare floats:
    those are a warning.
    """
    found = []
    for node in graph.calls:
        made = value(node)
        if made is None or not is_integer(made) or made.dtype == torch.int32 or _is_index(node):
            continue
        dtype = dtype_name(made.dtype)
        severity: Severity = "warning" if _compares_floats(node, made) else "error"
        found.append(
            at_node(
                "R7",
                node,
                f"{op_name(node)} makes {dtype}",
                "compute it on the host and pass it as an input",
                severity,
            )
        )
    if len(found) > INTEGER_BUDGET[spec.dialect]:
        yield from found


def _is_index(node: Node) -> bool:
    return op_name(node) in VIEWS | {"clone"} and through_views(node).op == "placeholder"


def _compares_floats(node: Node, made: torch.Tensor) -> bool:
    operands = [v for n in node.all_input_nodes if (v := value(n)) is not None]
    return made.dtype == torch.bool and all(
        v.dtype.is_floating_point or v.dtype == torch.bool for v in operands
    )


def check_operators(graph: Traced, spec: DeviceSpec) -> Iterator[Finding]:
    """R8: every operator runs on the card; an operator in no table is a warning."""
    for node in graph.calls:
        name = op_name(node)
        policy = op_policy(name, overload(node))
        if name == "getitem" or policy.kind == "native" or name in _TURNS:  # sin, cos: R29
            continue
        note = f" ({policy.note})" if policy.note else ""
        if policy.kind == "conditional":
            if _meets_condition(node):
                continue
            yield at_node(
                "R8", node, f"{name} needs {policy.note}", "change it, or keep it outside"
            )
        elif policy.kind == "unknown":
            remedy = "check the stack's table of operators, and add it to op_policy.py"
            yield at_node("R8", node, f"{name} is {policy.note}", remedy, "warning")
        else:
            what = "runs on the host" if policy.kind == "host" else "is not supported"
            yield at_node(
                "R8", node, f"{name} {what}{note}", "compute it outside and pass it as an input"
            )


def _meets_condition(node: Node) -> bool:
    condition = _CONDITIONS.get(op_name(node))
    return condition is not None and condition(node)


def _operands_are(node: Node, *dtypes: torch.dtype) -> bool:
    return all(v.dtype in dtypes for n in node.all_input_nodes if (v := value(n)) is not None)


def _index_is_int32(node: Node) -> bool:
    index = tensor_operand(node, 2, "index")
    return index is not None and index.dtype == torch.int32


def _no_int64(node: Node) -> bool:
    return not any(
        v.dtype == torch.int64 for n in node.all_input_nodes if (v := value(n)) is not None
    )


def _keeps_last(node: Node) -> bool:
    made = value(node)
    dims = operand(node, 1, "dims") or ()
    return made is not None and all(d not in (-1, made.dim() - 1) for d in dims)


_CONDITIONS: Mapping[str, Callable[[Node], bool]] = MappingProxyType(
    {
        "topk": lambda node: bool(operand(node, 1, "k") <= 4),
        "index_select": _index_is_int32,
        "prod": lambda node: operand(node, 1, "dim") is not None,
        "bitwise_and": lambda node: _operands_are(node, torch.bool),
        "max": _no_int64,
        "min": _no_int64,
        "flip": _keeps_last,
    }
)
"""What the notes of conditional operators say, as tests; the others are always found."""


def check_constants(graph: Traced, spec: DeviceSpec) -> Iterator[Finding]:
    """R12: no constant that is infinite or NaN, or becomes so in the dtype of its operator."""
    for node in graph.module.graph.nodes:
        bad: list[object] = [n for n in _numbers(node) if not _finite(n, value(node))]
        if node.op == "get_attr" and _holds_nonfinite(graph, node):
            bad = ["a stored tensor"]
        if bad:
            yield at_node(
                "R12",
                node,
                f"a constant is not finite: {bad[0]}",
                "use finfo.min / 2 of the device's dtype for what is hidden",
            )


def _numbers(node: Node) -> Iterator[float]:
    if node.op == "call_function":
        flat = torch.utils._pytree.tree_leaves((node.args, node.kwargs))
        yield from (a for a in flat if isinstance(a, float))


def _finite(number: float, made: torch.Tensor | None) -> bool:
    if made is None or not made.dtype.is_floating_point:
        return math.isfinite(number)
    return abs(number) <= torch.finfo(made.dtype).max


def _holds_nonfinite(graph: Traced, node: Node) -> bool:
    held: Any = graph.module
    for part in str(node.target).split("."):
        held = getattr(held, part, None)
    if not isinstance(held, torch.Tensor) or is_integer(held):
        return False
    try:
        return not bool(torch.isfinite(held).all())
    except (NotImplementedError, RuntimeError):  # no values: a traced or meta tensor
        return False


def check_row_ids(graph: Traced, spec: DeviceSpec) -> Iterator[Finding]:
    """R27: the ids that pick rows come from inputs, not from the graph or a stored default."""
    for node in graph.calls:
        if op_name(node) not in _ROW_PICKERS:
            continue
        index = operand(node, *_ROW_PICKERS[op_name(node)])
        root = through_views(index) if isinstance(index, Node) else node
        if graph.kind(root) == "user":
            continue
        made_by = "a buffer's default" if root.op != "call_function" else op_name(root)
        yield at_node(
            "R27",
            node,
            f"the ids of {op_name(node)} come from {made_by}",
            "compute positions and token types on the host and pass them",
        )


def check_moves(graph: Traced, spec: DeviceSpec) -> Iterator[Finding]:
    """R28: no step changes dtype and device at once."""
    for node in graph.calls:
        made = value(node)
        before = tensor_operand(node, 0, "self")
        if op_name(node) != "_to_copy" or made is None or before is None:
            continue
        if made.dtype != before.dtype and made.device != before.device:
            yield at_node(
                "R28",
                node,
                f"{dtype_name(before.dtype)} on {before.device.type} becomes "
                f"{dtype_name(made.dtype)} on {made.device.type} in one step",
                "move first, then convert, in two calls of .to()",
            )


def check_rotation(graph: Traced, spec: DeviceSpec) -> Iterator[Finding]:
    """R29: rotation tables are inputs; sin and cos run on the host."""
    for node in graph.calls:
        if op_name(node) in _TURNS:
            yield at_node(
                "R29",
                node,
                f"{op_name(node)} is computed in the graph",
                "pass rotation tables that were computed before compiling",
            )
