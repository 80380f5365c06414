# SPDX-License-Identifier: Apache-2.0
"""The rules about sizes and offsets of a graph, one function a rule."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from torch.fx import Node

from headswap.spyre.device import ITEM_BYTES, DeviceSpec
from headswap.spyre.findings import Finding
from headswap.spyre.op_policy import COPIES, VIEWS
from headswap.spyre.traced import (
    MATMULS,
    Traced,
    at_node,
    dtype_name,
    op_name,
    operand,
    product_operands,
    tensor_operand,
    value,
)


def check_products(graph: Traced, spec: DeviceSpec) -> Iterator[Finding]:
    """R5: K and N of matrix products are whole sticks. Head sizes are R4's, output heads R15's."""
    for node in graph.calls:
        factors = product_operands(node) if op_name(node) in MATMULS else None
        if factors is None:
            continue
        columns = factors[1].shape[-1]
        sizes = {"inner": factors[0].shape[-1], "output": columns}
        if node in graph.attention_products:  # the number of keys is left
            keys = "output" if any(node is a.scores for a in graph.attentions) else "inner"
            sizes = {"key": sizes[keys]}
        elif _is_head(node, columns, spec):
            del sizes["output"]
        for what, size in sizes.items():
            if isinstance(size, int) and size % spec.stick:
                yield at_node(
                    "R5",
                    node,
                    f"{what} size {size} of {op_name(node)} is no multiple of {spec.stick}",
                    "pad the weights with zeros when the model is prepared",
                )


def check_output_head(graph: Traced, spec: DeviceSpec) -> Iterator[Finding]:
    """R15: a head whose columns fill no stick stays on the host."""
    for node in graph.calls:
        factors = product_operands(node) if op_name(node) in MATMULS else None
        if factors and _is_head(node, factors[1].shape[-1], spec):
            yield at_node(
                "R15",
                node,
                f"an output head of {factors[1].shape[-1]} columns is in the graph",
                "leave the head out of the graph, gather rows first, and compute it on the host",
            )


def _is_head(node: Node, columns: Any, spec: DeviceSpec) -> bool:
    if not isinstance(columns, int) or columns % spec.stick == 0:
        return False
    return _reaches_output(node)


def _reaches_output(node: Node) -> bool:
    passed = VIEWS | COPIES | {"add", "getitem"}
    return any(
        u.op == "output" or (op_name(u) in passed and _reaches_output(u)) for u in node.users
    )


def check_offsets(graph: Traced, spec: DeviceSpec) -> Iterator[Finding]:
    """R9: along the last dimension, pieces begin at whole sticks and take every element."""
    for node in graph.calls:
        whole = _whole(node)
        if whole is None or not whole.dim():
            continue
        dtype = dtype_name(whole.dtype)
        stick = spec.stick_elements(dtype) if dtype in ITEM_BYTES else spec.stick
        offsets = [o for o in _offsets(node, whole) if isinstance(o, int)]
        inside = next((o for o in offsets if o % stick), None)
        if inside is not None:
            yield at_node(
                "R9",
                node,
                f"{op_name(node)} at offset {inside} of the last dimension, inside a stick",
                "pad the pieces to whole sticks; for rotary halves pass rotation tables",
            )


def _whole(node: Node) -> torch.Tensor | None:
    """The tensor that pieces are taken from, or put together to."""
    taken = tensor_operand(node, 0, "self")
    return value(node) if taken is None else taken


def _offsets(node: Node, whole: torch.Tensor) -> list[Any]:
    """Where pieces begin along the last dimension; a strided piece counts as its stride."""
    name, last = op_name(node), whole.dim() - 1
    size = whole.shape[-1]
    if name in ("slice", "slice_scatter"):
        shift = 1 if name == "slice_scatter" else 0
        start = operand(node, 2 + shift, "start") or 0
        step = operand(node, 4 + shift, "step") or 1
        begin = start + size if start < 0 else start
        return (
            [begin, step if step != 1 else 0]
            if _dim(node, 1 + shift, 0) % (last + 1) == last
            else []
        )
    if name == "select" and _dim(node, 1) % (last + 1) == last:
        index = operand(node, 2, "index")
        return [index + size if index < 0 else index]
    if name == "unbind" and _dim(node, 1, 0) % (last + 1) == last:
        return list(range(size))
    if name in ("split", "split_with_sizes") and _dim(node, 2, 0) % (last + 1) == last:
        given = operand(node, 1, "split_size")
        return list(range(0, size, given)) if isinstance(given, int) else _starts(given)
    if name == "cat" and _dim(node, 1, 0) % (last + 1) == last:
        return _starts(
            [v.shape[-1] for n in operand(node, 0, "tensors") if (v := value(n)) is not None]
        )
    if name == "constant_pad_nd":
        before, behind = operand(node, 1, "pad")[:2]
        return [before, size if behind else 0]
    return []


def _dim(node: Node, place: int, default: int = 0) -> int:
    found = operand(node, place, "dim")
    return default if found is None else int(found)


def _starts(sizes: Any) -> list[Any]:
    return list(accumulate(sizes, initial=0))[:-1]
