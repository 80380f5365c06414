# SPDX-License-Identifier: Apache-2.0
"""The rules about attention, masks and norms of a graph, one function a rule."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from headswap.spyre.device import DeviceSpec
from headswap.spyre.findings import Finding
from headswap.spyre.op_policy import SDPA, names
from headswap.spyre.traced import (
    MATMULS,
    Traced,
    at_node,
    dtype_name,
    op_name,
    product_operands,
    sdpa_mask,
    tensor_operand,
    value,
)

_MASK_BUILDERS = names(
    "where masked_fill full full_like new_full ones zeros new_ones new_zeros tril triu arange "
    "eq ne gt lt ge le logical_and logical_or logical_not bitwise_and bitwise_or"
)
_NORMS = names("native_layer_norm rms_norm _fused_rms_norm")


def check_head_sizes(graph: Traced, spec: DeviceSpec) -> Iterator[Finding]:
    """R4: head sizes are whole sticks, of queries and keys and of values."""
    for node, size in _head_sizes(graph):
        if size % spec.stick:
            yield at_node(
                "R4",
                node,
                f"head size {size} is no multiple of {spec.stick}",
                "pad heads when the model is prepared; scale by the original size",
            )


def _head_sizes(graph: Traced) -> Iterator[tuple[Node, int]]:
    for attention in graph.attentions:
        if factors := product_operands(attention.scores):
            yield attention.scores, factors[0].shape[-1]
        if factors := product_operands(attention.output):
            yield attention.output, factors[1].shape[-1]
    for node in _sdpa(graph):
        query, values = tensor_operand(node, 0, "query"), tensor_operand(node, 2, "value")
        yield from ((node, t.shape[-1]) for t in (query, values) if t is not None)


def _sdpa(graph: Traced) -> Iterator[Node]:
    return (n for n in graph.calls if op_name(n) in SDPA)


def check_attention_masks(graph: Traced, spec: DeviceSpec) -> Iterator[Finding]:
    """R11, in the graph: scores are masked by addition, with a mask that comes from an input."""
    remedy = "build an additive mask on the host and pass it as an input"
    for attention in graph.attentions:
        for node in attention.selected:
            yield at_node("R11", node, f"scores are masked by {op_name(node)}", remedy)
        for addend in attention.addends:
            if built := _built_by(addend):
                yield at_node("R11", addend, f"a mask is built in the graph by {built}", remedy)
    for node in _sdpa(graph):
        mask = sdpa_mask(node)
        made = value(mask) if mask is not None else None
        if mask is None or made is None:
            continue
        if built := _built_by(mask):
            yield at_node("R11", mask, f"a mask is built in the graph by {built}", remedy)
        elif not made.dtype.is_floating_point:
            yield at_node(
                "R11", mask, f"a mask of {dtype_name(made.dtype)} is no additive mask", remedy
            )


def _built_by(node: Node) -> str | None:
    """The first operator behind a mask that makes or chooses elements; products end the search."""
    pending, seen = [node], set[Node]()
    while pending:
        one = pending.pop()
        if one in seen or one.op != "call_function" or op_name(one) in MATMULS:
            continue
        seen.add(one)
        if op_name(one) in _MASK_BUILDERS:
            return op_name(one)
        pending.extend(one.all_input_nodes)
    return None


def check_fusion(graph: Traced, spec: DeviceSpec) -> Iterator[Finding]:
    """R13: no mask that a fused attention may drop.

    Attention as one operator has lost its mask for certain. Written out, it depends on how it is
    compiled, which a graph cannot show: a warning.
    """
    for node in _sdpa(graph):
        if sdpa_mask(node) is not None:
            yield at_node(
                "R13",
                node,
                f"{op_name(node)} with a mask, which the card's lowering drops",
                "use eager attention",
            )
    for attention in graph.attentions:
        if attention.addends:
            yield at_node(
                "R13",
                attention.softmax,
                "product, mask, softmax and product in one graph, which Inductor may fuse",
                "compile with pattern_matcher off, or the first product apart from the rest",
                "warning",
            )


def check_contiguous(graph: Traced, spec: DeviceSpec) -> Iterator[Finding]:
    """R14: what SDPA and norms read is contiguous."""
    for node, read in _layout_readers(graph):
        made = value(read)
        if made is not None and not made.is_contiguous():
            yield at_node(
                "R14",
                node,
                f"{op_name(node)} reads a {op_name(read)} that is not contiguous",
                "call .contiguous() before it",
            )


def _layout_readers(graph: Traced) -> Iterator[tuple[Node, Node]]:
    for node in graph.calls:
        name = op_name(node)
        if name in SDPA:
            yield from ((node, n) for n in node.args[:3] if isinstance(n, Node))
        elif name in _NORMS:
            yield node, node.all_input_nodes[0]
        elif name == "rsqrt" and (squared := _mean_of_squares(node)):
            yield node, squared


def _mean_of_squares(node: Node) -> Node | None:
    """What an RMS norm that is written out normalises: rsqrt(mean(x^2) + eps)."""
    for wanted in ("add", "mean"):
        node = node.all_input_nodes[0]
        if op_name(node) != wanted:
            return None
    square = node.all_input_nodes[0]
    return square.all_input_nodes[0] if op_name(square) in ("pow", "mul") else None
