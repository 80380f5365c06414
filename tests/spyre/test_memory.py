# SPDX-License-Identifier: Apache-2.0
"""A plan's memory is known before anything is compiled, and is what its graphs hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from spyre_models import FAMILIES, causal, converted
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from headswap.spyre import SENDNN, SPYRE, RuleWarning
from headswap.spyre.executor import Executor
from headswap.spyre.memory import memory
from headswap.spyre.op_policy import VIEWS
from headswap.spyre.traced import op_name, value

Plan = list[tuple[int, int]]


def held(graph: Any) -> int:
    """The most bytes that the values of a graph take at once; views take none."""
    nodes, root, last = list(graph.graph.nodes), {}, {}
    for place, node in enumerate(nodes):
        sources = node.all_input_nodes
        view = node.op == "call_function" and op_name(node) in VIEWS | {"getitem"} and sources
        root[node] = root[sources[0]] if view else node
        last |= dict.fromkeys((root[n] for n in (node, *sources)), place)
    live: dict[Any, int] = {}
    most = 0
    for place, node in enumerate(nodes):
        made = value(node)
        if node.op == "call_function" and root[node] is node and made is not None:
            live[node] = made.numel() * made.element_size()
        most = max(most, sum(live.values()))
        live = {n: size for n, size in live.items() if last[n] > place}
    return most


@pytest.mark.parametrize("shape", [(2, 64), (1, 192)])
@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "deberta-v2"])
def test_activations_are_a_bound_of_what_graphs_hold_and_near_it(
    kind: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks: list[int] = []

    def compiler(graph: Any, inputs: list[Any]) -> Any:
        def keep(aten: Any, _: Any) -> Any:
            peaks.append(held(aten))
            return make_boxed_func(aten.forward)

        return aot_autograd(fw_compiler=keep)(graph, inputs)

    monkeypatch.setattr("headswap.spyre.stack._cpu", lambda name, spec, rules: compiler)
    executor = Executor(converted(kind), backend="inductor", attention="native", shapes=[shape])
    plan: Any = executor.warmup().plan
    found = memory(executor.prepared, SPYRE, plan.shapes).activations
    assert max(peaks) <= found <= 2.5 * max(peaks)


@pytest.mark.parametrize("spec", [SENDNN, SPYRE], ids=["sendnn", "spyre"])
def test_a_plan_beyond_the_cards_memory_is_a_warning_with_its_numbers(spec: Any) -> None:
    model, shapes = converted("bert"), [(2, 64), (4, 128)]
    given: dict[str, Any] = {"backend": "checked", "shapes": shapes, "pad_weights": False}
    fits = Executor(model, rules="record", device=spec, **given)
    needed = fits.report()["memory"]
    layers = sum(p.numel() * 4 for n, p in model.backbone.named_parameters() if "layer." in n)
    assert needed["weights"] == layers
    assert needed["cache"] == 0
    assert needed["limit"] == 128 * 10**9
    assert "R30" not in {finding.rule for finding in fits.rules.findings}  # type: ignore[union-attr]
    small = replace(spec, memory_bytes=needed["total"] - 1)
    over = Executor(model, rules="record", device=small, **given)
    findings: Any = over.rules
    (finding,) = (f for f in findings.findings if f.rule == "R30")
    assert finding.severity == "warning"
    assert f"= {needed['total']:,} bytes; the card has {small.memory_bytes:,}" in finding.message
    assert not findings.errors
    with pytest.warns(RuleWarning, match="R30"):
        Executor(model, rules="warn", device=small, **given)


def test_a_cache_counts_with_all_its_blocks() -> None:
    model = causal("llama")  # two layers, two heads of keys, eight numbers each
    given: dict[str, Any] = {"backend": "checked", "rules": "record", "shapes": [(2, 128)],
                             "block_size": 64, "pad_weights": False}  # fmt: skip
    found = Executor(model, num_blocks=9, **given).report()["memory"]
    assert found["cache"] == 9 * 64 * 2 * 2 * (8 + 8) * 4
    half = Executor(model, num_blocks=9, dtype=torch.float16, **given).report()["memory"]
    assert half["cache"] * 2 == found["cache"]
    assert half["weights"] * 2 == found["weights"]
    assert half["activations"] * 2 == found["activations"]
    default = Executor(model, **given).report()["memory"]
    assert default["cache"] == (1 + 8_192 // 64) * 64 * 2 * 2 * (8 + 8) * 4


def test_no_card_no_memory() -> None:
    report = Executor(converted("bert"), backend="eager", shapes=[(2, 64)]).report()
    assert report["memory"] is None
    assert report["rules"] is None
