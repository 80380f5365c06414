# SPDX-License-Identifier: Apache-2.0
"""A graph of ATen operators as the rules see it: operators, values, inputs, attention."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from headswap.spyre.errors import RuleError
from headswap.spyre.findings import Dimension, Finding, RuleReport
from headswap.spyre.op_policy import COPIES, SDPA, VIEWS, names
from headswap.spyre.rules import Severity

InputKind = Literal["user", "parameter", "buffer"]

MATMULS = names("mm bmm addmm baddbmm linear matmul")
_BATCHED = names("bmm baddbmm matmul")
_BIASED = names("addmm baddbmm")
# What lies between the two products of attention, beside views: scaling, bias, mask, soft cap.
_SCORE_STEPS = VIEWS | COPIES | names("mul div add sub tanh masked_fill where maximum")
_LINE = re.compile(r'File "(.+?)", line (\d+), in .*\n\s*(.*)')


@dataclass(frozen=True, slots=True)
class Input:
    """One tensor that the graph is called with.

    `kind` tells the model's own tensors. `mask`: what is added to attention's scores; by itself
    where the name says so, and where the graph shows it.
    """

    name: str
    tensor: torch.Tensor
    kind: InputKind = "user"
    mask: bool = False

    @property
    def is_mask(self) -> bool:
        """Whether name or graph says that it is an attention mask (or a bias, used like one)."""
        return self.kind == "user" and (self.mask or "mask" in self.name)


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention written out: `scores` = Q K^T, `softmax`, `output` = P V.

    `addends` are what is added to the scores (mask, bias); `selected` are steps that choose among
    scores by a boolean mask.
    """

    scores: Node
    softmax: Node
    output: Node
    addends: tuple[Node, ...]
    selected: tuple[Node, ...]


def op_name(node: Node) -> str:
    """ATen's name without namespace and overload; "getitem" for parts; others with namespace."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name
        return name.removeprefix("aten::")
    return getattr(target, "__name__", str(target))


def overload(node: Node) -> str:
    """The overload of an ATen operator, "" for anything else."""
    return str(getattr(node.target, "_overloadname", ""))


def value(node: Node) -> torch.Tensor | None:
    """The tensor that the node makes; None where it makes none, or several."""
    found = node.meta.get("val")
    return found if isinstance(found, torch.Tensor) else None


def operand(node: Node, place: int, name: str) -> Any:
    """The argument at `place`, or called `name`; None where it was left out."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def tensor_operand(node: Node, place: int, name: str) -> torch.Tensor | None:
    """The value of that argument, where it is a tensor."""
    found = operand(node, place, name)
    return value(found) if isinstance(found, Node) else None


def source_line(node: Node) -> str | None:
    """ "file:line: code" of the innermost frame that made the node."""
    frames = _LINE.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return None
    path, line, code = frames[-1]
    return f"{path.rpartition('site-packages/')[2]}:{line}: {code.strip()}"


def sizes(tensor: torch.Tensor) -> tuple[Dimension, ...]:
    """The shape; a symbolic size as text."""
    return tuple(s if isinstance(s, int) else str(s) for s in tensor.shape)


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name without the module: "float16"."""
    return str(dtype).removeprefix("torch.")


def is_integer(tensor: torch.Tensor) -> bool:
    """Whether the elements are integers or truth values."""
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def at_node(
    rule: str, node: Node, message: str, remedy: str, severity: Severity = "error"
) -> Finding:
    """A finding at a node."""
    made = value(node)
    return Finding(
        rule,
        severity,
        message,
        remedy,
        node.name,
        None if made is None else sizes(made),
        None if made is None else dtype_name(made.dtype),
        source_line(node),
    )


def at_input(rule: str, given: Input, message: str, remedy: str) -> Finding:
    """A finding at an input."""
    shape, dtype = sizes(given.tensor), dtype_name(given.tensor.dtype)
    return Finding(rule, "error", message, remedy, given.name, shape, dtype)


def through_views(node: Node) -> Node:
    """Where the node's elements come from, behind views and copies."""
    while op_name(node) in VIEWS | {"clone", "contiguous", "_to_copy", "getitem"}:
        if node.op != "call_function" or not node.all_input_nodes:
            break
        node = node.all_input_nodes[0]
    return node


@dataclass(frozen=True)
class Traced:
    """A graph and what it is called with; `inputs` and the graph's placeholders correspond."""

    module: GraphModule
    inputs: tuple[tuple[Node, Input], ...]

    @cached_property
    def calls(self) -> tuple[Node, ...]:
        """The nodes that call an operator."""
        return tuple(n for n in self.module.graph.nodes if n.op == "call_function")

    @cached_property
    def valued(self) -> tuple[tuple[Node, torch.Tensor], ...]:
        """The nodes with the tensor that each makes, inputs and constants among them."""
        pairs = ((n, value(n)) for n in self.module.graph.nodes if n.op != "output")
        return tuple((node, made) for node, made in pairs if made is not None)

    @cached_property
    def attentions(self) -> tuple[Attention, ...]:
        """The attentions that are written out as products."""
        found = (_attention(n) for n in self.calls if "softmax" in op_name(n))
        return tuple(a for a in found if a is not None)

    @cached_property
    def masks(self) -> frozenset[Node]:
        """What is added to scores: masks and position biases, in every form of attention."""
        addends = {n for a in self.attentions for n in a.addends}
        return frozenset(addends | {m for n in self.calls if (m := sdpa_mask(n))})

    @cached_property
    def given(self) -> tuple[Input, ...]:
        """The inputs, with those marked that the graph uses as masks."""
        roots = {through_views(n) for n in self.masks}
        return tuple(replace(i, mask=i.mask or n in roots) for n, i in self.inputs)

    @cached_property
    def attention_products(self) -> frozenset[Node]:
        """Both products of every attention."""
        return frozenset(n for a in self.attentions for n in (a.scores, a.output))

    def kind(self, node: Node) -> InputKind | None:
        """What kind of input a node is; None where it is none."""
        return next((given.kind for n, given in self.inputs if n is node), None)


def traced(module: GraphModule, inputs: Sequence[Input | Any]) -> Traced:
    """Pair a graph of ATen operators with its inputs, in order; numbers among them are left out.

    Raises `RuleError` for a graph that is not of ATen operators with known values.
    """
    places = [n for n in module.graph.nodes if n.op == "placeholder"]
    if len(places) != len(inputs):
        raise _unfit(f"has {len(places)} inputs, and {len(inputs)} were given")
    for node in module.graph.nodes:
        if node.op in ("call_module", "call_method"):
            raise _unfit(f"calls {node.target!r}, which is no ATen operator")
        if node.op == "call_function" and "val" not in node.meta:
            raise _unfit(f"has no value for {node.name!r}")
    pairs = []
    for node, given in zip(places, inputs, strict=True):
        one = Input(node.name, given) if isinstance(given, torch.Tensor) else given
        if isinstance(one, Input):
            node.meta.setdefault("val", one.tensor)
            pairs.append((node, one))
    return Traced(module, tuple(pairs))


def _unfit(why: str) -> RuleError:
    return RuleError(
        f"The graph {why}. The rules are about ATen graphs with their values: trace with "
        "`RulesBackend` under torch.compile, or make_fx(..., tracing_mode='fake').",
        report=RuleReport(),
    )


def sdpa_mask(node: Node) -> Node | None:
    """The mask of attention that is one operator; None for other operators too."""
    if op_name(node) not in SDPA:
        return None
    fourth = node.args[3] if len(node.args) > 3 else None
    found = node.kwargs.get("attn_mask") or node.kwargs.get("attn_bias") or fourth
    return found if isinstance(found, Node) else None


def _attention(softmax: Node) -> Attention | None:
    scores = _product_behind(softmax.all_input_nodes[0])
    output = _product_after(softmax)
    if scores is None or output is None:
        return None
    steps = tuple(_steps(softmax.all_input_nodes[0]))
    addends = [b for step in steps if op_name(step) in ("add", "sub") for b in _others(step)]
    if op_name(scores) == "baddbmm":
        addends.append(scores.all_input_nodes[0])
    selected = tuple(n for n in steps if op_name(n) in ("masked_fill", "where"))
    return Attention(scores, softmax, output, tuple(addends), selected)


def _product_behind(node: Node) -> Node | None:
    """The batched product that the scores come from."""
    if op_name(node) in _BATCHED:
        return node
    if op_name(node) not in _SCORE_STEPS:
        return None
    return next((p for n in node.all_input_nodes if (p := _product_behind(n))), None)


def _product_after(node: Node) -> Node | None:
    for user in node.users:
        if op_name(user) in _BATCHED:
            return user
        if op_name(user) in VIEWS | COPIES | {"mul", "getitem"} and (p := _product_after(user)):
            return p
    return None


def _steps(node: Node) -> Iterator[Node]:
    """The steps from the softmax back to the product, along the scores."""
    while op_name(node) in _SCORE_STEPS:
        yield node
        node = next(n for n in node.all_input_nodes if _product_behind(n))


def _others(step: Node) -> list[Node]:
    return [n for n in step.all_input_nodes if _product_behind(n) is None]


def product_operands(node: Node) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Both factors of a matrix product, `[..., rows, K]` and `[..., K, N]`."""
    first = 1 if op_name(node) in _BIASED else 0
    factors = [value(n) for n in node.args[first : first + 2] if isinstance(n, Node)]
    if len(factors) != 2 or factors[0] is None or factors[1] is None:
        return None
    left, right = factors[0], factors[1]
    return left, (right.t() if op_name(node) == "linear" else right)
