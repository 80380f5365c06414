# SPDX-License-Identifier: Apache-2.0
"""A `torch.compile` backend that checks each graph against the card's rules and then runs it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]
from torch.fx import GraphModule

from headswap.spyre import attention_checks, checks, input_checks, layout_checks
from headswap.spyre.checks import GraphCheck
from headswap.spyre.device import DeviceSpec
from headswap.spyre.errors import DeviceError, RuleError, RuleWarning
from headswap.spyre.findings import Finding, RuleReport
from headswap.spyre.input_checks import InputCheck
from headswap.spyre.rules import RULES
from headswap.spyre.traced import Input, Traced, traced

Compiler = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]
Then = Literal["eager", "inductor"] | Compiler
OnViolation = Literal["raise", "warn", "record"]

GRAPH_CHECKS: Mapping[str, GraphCheck] = MappingProxyType(
    {
        "R1": checks.check_static,
        "R4": attention_checks.check_head_sizes,
        "R5": layout_checks.check_products,
        "R6": checks.check_dtypes,
        "R7": checks.check_integers,
        "R8": checks.check_operators,
        "R9": layout_checks.check_offsets,
        "R11": attention_checks.check_attention_masks,
        "R12": checks.check_constants,
        "R13": attention_checks.check_fusion,
        "R14": attention_checks.check_contiguous,
        "R15": layout_checks.check_output_head,
        "R27": checks.check_row_ids,
        "R28": checks.check_moves,
        "R29": checks.check_rotation,
    }
)
"""For each rule that is enforced on graphs, the function that looks for breaches."""

INPUT_CHECKS: Mapping[str, InputCheck] = MappingProxyType(
    {
        "R3": input_checks.check_lengths,
        "R10": input_checks.check_storage,
        "R11": input_checks.check_masks,
        "R22": input_checks.check_mode,
        "R25": input_checks.check_pad_side,
    }
)
"""For each rule that is enforced on inputs, the function that looks for breaches."""

_SHOWN = 3
"""Kinds of findings that a message names."""


def check_graph(
    gm: GraphModule, example_inputs: Sequence[Input | Any], spec: DeviceSpec
) -> RuleReport:
    """What a graph of ATen operators and its inputs break of the rules of `spec.dialect`.

    `gm` is functional and not decomposed; its nodes have `meta["val"]`. `example_inputs` go with
    its placeholders in order: tensors, or `Input`s, which say what belongs to the model. Raises
    `RuleError` for a graph of anything else.
    """
    graph = traced(gm, example_inputs)
    return RuleReport([*_graph_findings(graph, spec), *check_inputs(graph.given, spec).findings])


def check_inputs(
    inputs: Mapping[str, torch.Tensor] | Sequence[Input], spec: DeviceSpec
) -> RuleReport:
    """What a graph's inputs break: `Input`s, or tensors by name (a mask has "mask" in its name)."""
    if isinstance(inputs, Mapping):
        inputs = [Input(name, tensor) for name, tensor in inputs.items()]
    found = []
    for rule in RULES:
        if "inputs" in rule.places and rule.applies(spec.dialect):
            found += [_judged(f, spec) for f in INPUT_CHECKS[rule.id](inputs, spec)]
    return RuleReport(found)


def _graph_findings(graph: Traced, spec: DeviceSpec) -> Iterator[Finding]:
    for rule in RULES:
        if "graph" in rule.places and rule.applies(spec.dialect):
            yield from (_judged(f, spec) for f in GRAPH_CHECKS[rule.id](graph, spec))


def _judged(finding: Finding, spec: DeviceSpec) -> Finding:
    """The finding with the milder of its own severity and its rule's in the dialect."""
    rule = next(r for r in RULES if r.id == finding.rule)
    if rule.severity[spec.dialect] == "warning":
        return replace(finding, severity="warning")
    return finding


class RulesBackend:
    """For `torch.compile(backend=...)`: checks each graph before decomposition, then runs it.

    spec          the device and dialect
    then          "eager" runs the checked ATen graph, "inductor" compiles with Inductor; a callable
                  is given what `torch.compile` gives a backend
    on_violation  "raise": a call into a graph with errors raises `RuleError`; "warn": one
                  `RuleWarning` a graph; "record": neither

    What is found is in `report`, over all graphs. An error is raised when the graph is called, not
    while it is compiled, so that it arrives as itself and no setting of dynamo can turn it into a
    silent fall-back. Use it under `torch.no_grad`, with fullgraph=True and dynamic=False.
    """

    def __init__(
        self, spec: DeviceSpec, then: Then = "eager", on_violation: OnViolation = "raise"
    ) -> None:
        if on_violation not in ("raise", "warn", "record"):
            raise DeviceError(
                f"on_violation is {on_violation!r}; expected 'raise', 'warn' or 'record'."
            )
        if not callable(then) and then not in ("eager", "inductor"):
            raise DeviceError(f"then is {then!r}; expected 'eager', 'inductor' or a backend.")
        self.spec = spec
        self.then = then
        self.on_violation = on_violation
        self._reports: list[RuleReport] = []

    @property
    def graphs(self) -> int:
        """How many graphs were checked: one a layer and shape."""
        return len(self._reports)

    @property
    def report(self) -> RuleReport:
        """Everything found so far."""
        return sum(self._reports, RuleReport())

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        named = _named(gm, example_inputs)
        lowered: list[tuple[GraphModule, list[Input | Any]]] = []

        def keep(aten: GraphModule, traced_inputs: Sequence[Any]) -> Callable[..., Any]:
            lowered.append((aten, _matched(named, traced_inputs)))
            return make_boxed_func(aten.forward)

        run = aot_autograd(fw_compiler=keep)(gm, example_inputs)
        # Out here no tracing mode is active, so masks can be looked at by value.
        report = sum((check_graph(*pair, self.spec) for pair in lowered), RuleReport())
        self._reports.append(report)
        if report.errors and self.on_violation == "raise":
            return _refuse(report, self.spec)
        if not report.clean and self.on_violation == "warn":
            warnings.warn(summary(report, self.spec), RuleWarning, stacklevel=2)
        return run if self.then == "eager" else _compiler(self.then)(gm, example_inputs)


def _compiler(then: Then) -> Compiler:
    if callable(then):
        return then
    from torch._inductor import compile_fx

    return cast("Compiler", compile_fx.compile_fx)


def _named(gm: GraphModule, example_inputs: Sequence[Any]) -> list[Input | Any]:
    """Inputs with the names that dynamo gave them, which say what belongs to the model."""
    places = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    return [
        Input(_plain(name), given, _kind(name, given)) if isinstance(given, torch.Tensor) else given
        for name, given in zip(places, example_inputs, strict=True)
    ]


def _plain(name: str) -> str:
    return name.removeprefix("l_").strip("_")


def _kind(name: str, given: torch.Tensor) -> Literal["user", "parameter", "buffer"]:
    if isinstance(given, torch.nn.Parameter) or "_parameters_" in name:
        return "parameter"
    return "buffer" if "_buffers_" in name else "user"


def _matched(named: list[Input | Any], traced_inputs: Sequence[Any]) -> list[Input | Any]:
    """Real inputs for the traced ones; tensors that tracing took from the module stand in front."""
    extra = len(traced_inputs) - len(named)
    if extra < 0:  # equal inputs were merged: names are lost, values too
        return list(traced_inputs)
    own = [Input(f"constant_{i}", t, "parameter") for i, t in enumerate(traced_inputs[:extra])]
    return [*own, *named]


def _refuse(report: RuleReport, spec: DeviceSpec) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise RuleError(summary(report, spec), report=report)

    return refuse


def summary(report: RuleReport, spec: DeviceSpec, what: str = "The graph breaks") -> str:
    """How many findings of which kind, and the first of them."""
    first = "\n".join(str(f) for f in report.findings[:_SHOWN])
    rest = len(report.findings) - _SHOWN
    more = f"\n... and {rest} more kinds; see .report" if rest > 0 else ""
    return f"{what} rules of {spec.dialect}: {report.summary}.\n{first}{more}"
