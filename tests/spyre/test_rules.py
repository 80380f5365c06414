# SPDX-License-Identifier: Apache-2.0
"""Each rule on a toy graph that breaks it and one that keeps it; reports; the compile backend."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from tiny_models import tiny
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from headswap.registry.errors import HeadswapError
from headswap.spyre import (
    RULES,
    SENDNN,
    SPYRE,
    DeviceError,
    Finding,
    Input,
    RuleError,
    RuleReport,
    RulesBackend,
    RuleWarning,
    check_graph,
    check_inputs,
    op_policy,
)
from headswap.spyre.checker import GRAPH_CHECKS, INPUT_CHECKS


def half(*shape: int) -> Tensor:
    return torch.randn(shape).half()


def report(
    function: Callable[..., Any], *args: Any, spec: Any = SPYRE, mode: str = "fake", **kinds: Any
) -> RuleReport:
    """What is found in `function`, traced over `args`; `kinds` = {"x1": "buffer"} by position."""
    with torch.no_grad():
        gm = make_fx(function, tracing_mode=mode)(*args)
    places = [n for n in gm.graph.nodes if n.op == "placeholder"]
    given = [
        Input(f"x{i}", arg, kinds.get(f"x{i}", "user")) if isinstance(arg, Tensor) else arg
        for i, arg in enumerate(args)
    ]
    assert len(places) == len(given)
    return check_graph(gm, given, spec)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.125 + mask, -1) @ v


def attention_args(head: int = 64, mask: Tensor | None = None) -> tuple[Tensor, ...]:
    qkv = [half(2, 2, 64, head) for _ in range(3)]
    return (*qkv, half(2, 1, 64, 64) if mask is None else mask)


def rotated(x: Tensor, cut: int) -> Tensor:
    return torch.cat((-x[..., cut:], x[..., :cut]), -1)


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    hidden = torch.full((64, 64), -100.0, dtype=q.dtype).triu(1)
    return attend(q, k, v, hidden)


class Toy(NamedTuple):
    """Calls that give a report with the rule's finding, and one without."""

    breaks: Callable[[], RuleReport]
    keeps: Callable[[], RuleReport]
    severity: str = "error"


x64 = torch.arange(64)[None].expand(2, 64).contiguous()
GRAPH_TOYS: dict[str, Toy] = {
    "R1": Toy(
        lambda: report(lambda x: x + 1, half(2, 64, 64), mode="symbolic"),
        lambda: report(lambda x: x + 1, half(2, 64, 64)),
    ),
    "R4": Toy(
        lambda: report(attend, *attention_args(32)), lambda: report(attend, *attention_args(64))
    ),
    "R5": Toy(
        lambda: report(lambda x, w: torch.relu(x @ w), half(64, 96), half(96, 64)),
        lambda: report(lambda x, w: torch.relu(x @ w), half(65, 128), half(128, 64)),
    ),
    "R6": Toy(
        lambda: report(lambda x, w: (x.float() @ w.float()).half(), half(64, 64), half(64, 64)),
        lambda: report(lambda x: rms(x.float()).half(), half(2, 64, 64)),
    ),
    "R7": Toy(
        lambda: report(lambda ids: (ids + 1).int(), x64),
        lambda: report(lambda w, ids: F.embedding(ids[:, :32], w), half(9, 64), x64),
    ),
    "R8": Toy(
        lambda: report(lambda x: x.cumsum(-1), half(2, 64)),
        lambda: report(lambda x: F.gelu(F.layer_norm(x, (64,))).tanh(), half(2, 64, 64)),
    ),
    "R9": Toy(
        lambda: report(lambda x: rotated(x, 32), half(2, 64, 64)),
        lambda: report(lambda x: rotated(x, 64), half(2, 64, 128)),
    ),
    "R11": Toy(
        lambda: report(causal, *attention_args()), lambda: report(attend, *attention_args())
    ),
    "R12": Toy(
        lambda: report(lambda x: x + float("-inf"), half(2, 64)),
        lambda: report(lambda x: x + -32752.0, half(2, 64)),
    ),
    "R13": Toy(
        lambda: report(F.scaled_dot_product_attention, *attention_args()),
        lambda: report(F.scaled_dot_product_attention, *attention_args()[:3]),
    ),
    "R14": Toy(
        lambda: report(lambda x: F.layer_norm(x.transpose(1, 2), (64,)), half(2, 64, 64)),
        lambda: report(
            lambda x: F.layer_norm(x.transpose(1, 2).contiguous(), (64,)), half(2, 64, 64)
        ),
    ),
    "R15": Toy(
        lambda: report(F.linear, half(2, 64), half(3, 64), half(3)),
        lambda: report(F.linear, half(2, 64), half(64, 64), half(64)),
    ),
    "R27": Toy(
        lambda: report(lambda w: F.embedding(torch.zeros(2, 64, dtype=torch.long), w), half(9, 64)),
        lambda: report(lambda w, ids: F.embedding(ids, w), half(9, 64), x64),
    ),
    "R28": Toy(
        lambda: report(lambda x: x.to("meta", torch.float32), half(2, 64)),
        lambda: report(lambda x: x.to("meta").to(torch.float32), half(2, 64)),
    ),
    "R29": Toy(
        lambda: report(lambda x: x.cos(), half(64, 64)), lambda: report(torch.exp, half(64, 64))
    ),
}


def inputs(spec: Any = SPYRE, **tensors: Tensor) -> RuleReport:
    return check_inputs(tensors, spec)


@torch.inference_mode()
def inference_tensor() -> Tensor:
    return torch.zeros(2, 64, 64).half()


left, right = torch.ones(2, 64, dtype=torch.long), torch.ones(2, 64, dtype=torch.long)
left[1, :5], right[1, -5:] = 0, 0
INPUT_TOYS: dict[str, Toy] = {
    "R3": Toy(lambda: inputs(hidden=half(2, 65, 64)), lambda: inputs(hidden=half(2, 1, 64))),
    "R10": Toy(
        lambda: inputs(hidden=half(4, 64, 64)[2:]),
        lambda: inputs(hidden=half(4, 64, 64)[2:].clone()),
    ),
    "R11": Toy(
        lambda: inputs(mask=torch.full((2, 1, 64, 64), -torch.inf).half()),
        lambda: inputs(mask=torch.full((2, 1, 64, 64), -32752.0).half()),
    ),
    "R22": Toy(lambda: inputs(hidden=inference_tensor()), lambda: inputs(hidden=half(2, 64, 64))),
    "R25": Toy(lambda: inputs(attention_mask=left), lambda: inputs(attention_mask=right)),
}
TOYS = {("graph", k): v for k, v in GRAPH_TOYS.items()} | {
    ("inputs", k): v for k, v in INPUT_TOYS.items()
}
CHECKED = [(p, r.id) for r in RULES for p in r.places if p in ("graph", "inputs")]


@pytest.mark.parametrize(("place", "rule"), CHECKED)
def test_each_checked_rule_finds_its_breach_and_nothing_where_it_is_kept(
    place: str, rule: str
) -> None:
    toy = TOYS[place, rule]
    assert toy.severity in {f.severity for f in toy.breaks().findings if f.rule == rule}
    assert [f for f in toy.keeps().findings if f.rule == rule] == []


def test_every_checked_rule_has_a_check_and_no_check_is_left_over() -> None:
    assert {rule for place, rule in CHECKED if place == "graph"} == set(GRAPH_CHECKS)
    assert {rule for place, rule in CHECKED if place == "inputs"} == set(INPUT_CHECKS)
    assert [r.id for r in RULES] == [f"R{i}" for i in range(1, 31)]


MORE: dict[str, tuple[str, Callable[[], RuleReport]]] = {
    "a bool mask of SDPA": (
        "R11",
        lambda: report(
            F.scaled_dot_product_attention, *attention_args(mask=torch.ones(2, 1, 64, 64).bool())
        ),
    ),
    "scores masked by where": (
        "R11",
        lambda: report(
            lambda q, k, v, m: torch.softmax(torch.where(m, q @ k.mT, -100.0), -1) @ v,
            *attention_args(mask=torch.ones(2, 1, 64, 64).bool()),
        ),
    ),
    "a mask without a telling name": (
        "R11",
        lambda: report(attend, *attention_args(mask=torch.full((2, 1, 64, 64), -torch.inf).half())),
    ),
    "a number that overflows fp16": ("R12", lambda: report(lambda x: x + -1e9, half(2, 64))),
    "an RMS norm of a transposed operand": (
        "R14", lambda: report(lambda x: rms(x.transpose(1, 2)), half(2, 64, 64)),
    ),
    "keys that fill no stick": (
        "R5",
        lambda: report(attend, half(2, 2, 64, 64), half(2, 2, 60, 64), half(2, 2, 60, 64),
                       half(2, 1, 64, 60)),
    ),
    "ids from a buffer": (
        "R27", lambda: report(lambda w, i: F.embedding(i, w), half(9, 64), x64, x1="buffer"),
    ),
    "a fp32 operator outside the list": (
        "R6", lambda: report(lambda x: x.float().log(), half(2, 64)),
    ),
    "every second element": ("R9", lambda: report(lambda x: x[..., ::2], half(2, 64))),
    "a split inside a stick": ("R9", lambda: report(lambda x: x.chunk(2, -1), half(2, 64))),
    "a pad behind an odd width": ("R9", lambda: report(lambda x: F.pad(x, (0, 4)), half(2, 60))),
    "the same piece twice": (
        "R9", lambda: report(lambda x: torch.cat((x, x), -1), half(2, 32)),
    ),
    "an operator in no table": ("R8", lambda: report(torch.digamma, half(2, 64))),
    "a top five": ("R8", lambda: report(lambda x: x.topk(5)[0], half(2, 64))),
    "an int64 index": (
        "R8", lambda: report(lambda x, i: x.index_select(0, i), half(9, 64), torch.arange(4)),
    ),
    "two inputs of one storage": (
        "R10", lambda: inputs(**dict(zip("ab", half(2, 2, 64, 64).unbind(), strict=True))),
    ),
    "an expanded input": ("R10", lambda: inputs(hidden=half(1, 64, 64).expand(2, -1, -1))),
    "the front of a larger storage": ("R10", lambda: inputs(hidden=half(4, 64, 64)[:2])),
    "a mask of zeros and ones": ("R11", lambda: inputs(attention_mask=right)),
    "too many rows": ("R3", lambda: inputs(hidden=half(65, 64, 8))),
    "gradients": ("R22", lambda: inputs(hidden=half(2, 64, 64).requires_grad_())),
    "right pads for sendnn": ("R25", lambda: inputs(SENDNN, attention_mask=right)),
}  # fmt: skip


@pytest.mark.parametrize("name", MORE)
def test_other_forms_of_a_breach_are_found(name: str) -> None:
    rule, found = MORE[name]
    assert rule in {f.rule for f in found().findings}


CLEAN: dict[str, Callable[[], RuleReport]] = {
    "softmax in fp32": lambda: report(
        lambda x: torch.softmax(x, -1, dtype=torch.float32).half(), half(2, 64)
    ),
    "an int32 index": lambda: report(
        lambda x, i: x.index_select(0, i), half(9, 64), torch.arange(4).int()
    ),
    "a router's softmax without attention": lambda: report(
        lambda x, w: torch.softmax(x @ w + 1.0, -1), half(64, 64), half(64, 64)
    ),
    "aligned pieces of a fused projection": lambda: report(
        lambda x: [piece * 1 for piece in x.split(64, -1)], half(2, 64, 192)
    ),
    "a KV cache, which has no length": lambda: inputs(cache=half(3, 64, 2, 64)),
    "a decode step's mask": lambda: inputs(attention_mask=half(2, 1, 1, 64)),
}


@pytest.mark.parametrize("name", CLEAN)
def test_what_the_card_runs_is_not_found(name: str) -> None:
    assert CLEAN[name]().findings == ()


def test_a_rule_of_both_dialects_may_weigh_less_in_one() -> None:
    (spyre,) = report(lambda x: rotated(x, 32)[..., :32], half(2, 64)).errors[:1]
    sendnn = report(lambda x: rotated(x, 32)[..., :32], half(2, 64), spec=SENDNN)
    assert (spyre.rule, sendnn.errors) == ("R9", ())
    assert "R9" in {f.rule for f in sendnn.warnings}


def test_sendnn_takes_two_integer_results_and_symbolic_paged_decoders_only() -> None:
    def added(times: int) -> RuleReport:
        return report(lambda i: [i + n for n in range(1, times + 1)], x64, spec=SENDNN)

    assert (added(2).clean, {f.rule for f in added(3).errors}) == (True, {"R7"})
    symbolic = report(lambda x: x + 1, half(2, 64, 64), spec=SENDNN, mode="symbolic")
    assert {f.rule for f in symbolic.errors} == {"R1"}


def test_operators_have_a_policy_by_overload_first_and_unknown_ones_say_so() -> None:
    assert op_policy("where", "self").kind == "native"
    assert op_policy("where", "default").kind == "missing"
    assert op_policy("never_heard_of").kind == "unknown"


def test_reports_merge_equal_findings_sort_errors_first_and_survive_json() -> None:
    one = Finding("R9", "warning", "m", "do", node="a", shape=(2, "s0"), dtype="float16")
    other = Finding("R10", "error", "n", "do", node="b", source="f.py:1: x")
    both = RuleReport([one, replace(one, node="c", count=2)]) + RuleReport([other])
    assert [(f.rule, f.node, f.count) for f in both.findings] == [("R10", "b", 1), ("R9", "a", 3)]
    assert (both.errors, len(both.warnings), both.clean) == ((other,), 1, False)
    assert RuleReport.from_dict(json.loads(both.to_json())) == both
    text = str(both)
    assert "1 error, 3 warnings" in text
    assert all(part in text for part in ("x3", "f.py:1: x", "-> do"))
    assert RuleReport().clean


def test_a_graph_of_something_else_is_refused() -> None:
    module = torch.fx.symbolic_trace(torch.nn.Linear(64, 64))
    with pytest.raises(RuleError, match="has no value for") as caught:
        check_graph(module, [half(2, 64)], SPYRE)
    assert isinstance(caught.value, HeadswapError)
    with pytest.raises(RuleError, match="has 1 inputs, and 2 were given"):
        check_graph(module, [half(2, 64), half(2, 64)], SPYRE)


# The backend.


def bad(x: Tensor) -> Tensor:
    return torch.flip(x.cumsum(-1), (0,))


def compiled(function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)


@torch.no_grad()
def test_raise_refuses_each_call_with_the_report_and_never_falls_back() -> None:
    backend = RulesBackend(SPYRE)
    run = compiled(bad, backend)
    for _ in range(2):
        with torch._dynamo.config.patch(suppress_errors=True), pytest.raises(RuleError) as caught:
            run(half(2, 64, 64))
    assert (caught.value.report, backend.graphs) == (backend.report, 1)
    assert "spyre: 1 error" in str(caught.value)
    assert "cumsum runs on the host" in str(caught.value)
    assert "-> compute it outside" in str(caught.value)
    assert isinstance(caught.value, ValueError)


@torch.no_grad()
def test_warn_warns_once_a_graph_and_record_is_silent_and_both_run() -> None:
    x = half(2, 64, 64)
    with pytest.warns(RuleWarning, match="1 error") as caught:
        assert torch.equal(compiled(bad, RulesBackend(SPYRE, on_violation="warn"))(x), bad(x))
    assert len([w for w in caught if w.category is RuleWarning]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuleWarning)
        backend = RulesBackend(SPYRE, on_violation="record")
        assert torch.equal(compiled(bad, backend)(x), bad(x))
    assert {f.rule for f in backend.report.errors} == {"R8"}


@torch.no_grad()
def test_a_mask_is_looked_at_by_value_when_its_graph_is_compiled() -> None:
    backend = RulesBackend(SPYRE)
    args = attention_args(mask=torch.full((2, 1, 64, 64), -torch.inf).half())
    with pytest.raises(RuleError, match="not finite"):
        compiled(attend, backend)(*args)


@torch.no_grad()
def test_another_backend_gets_what_torch_compile_gives_one() -> None:
    seen: list[Any] = []

    def mine(gm: Any, example_inputs: Any) -> Any:
        seen.append([n.op for n in gm.graph.nodes])
        return gm.forward

    x = half(2, 64, 64)
    assert torch.equal(compiled(rms, RulesBackend(SPYRE, mine, "record"))(x), rms(x))
    assert "call_method" in seen[0]


@pytest.mark.parametrize("wrong", [{"then": "cuda"}, {"on_violation": "ignore"}])
def test_an_unknown_mode_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(DeviceError, match="expected"):
        RulesBackend(SPYRE, **wrong)


@torch.no_grad()
def test_sizes_left_open_are_found_and_each_new_shape_is_a_graph_of_its_own() -> None:
    torch._dynamo.reset()
    backend = RulesBackend(SPYRE, on_violation="record")
    run = torch.compile(rms, backend=backend, fullgraph=True, dynamic=True)
    assert run(half(2, 64, 64)).shape == (2, 64, 64)
    assert "R1" in {f.rule for f in backend.report.errors}
    torch._dynamo.reset()
    backend = RulesBackend(SPYRE)
    run = torch.compile(rms, backend=backend, fullgraph=True, dynamic=False)
    for length in (64, 128, 64):
        run(half(2, length, 64))
    assert (backend.graphs, backend.report.clean) == (2, True)


# Real layers.

SIZE = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 128}


def layers(model_type: str) -> tuple[list[Any], dict[str, Any]]:
    """fp16 layers with head size 64, and what to call them with beside hidden states and mask."""
    more = {"num_key_value_heads": 2} if model_type == "llama" else {}
    model = tiny(model_type, "AutoModel", **SIZE, **more).half()
    model.config._attn_implementation = "eager"
    if model_type == "llama":
        turns = model.rotary_emb(half(2, 64, 128), torch.arange(64)[None])
        return list(model.layers), {"position_embeddings": turns}
    for layer in model.encoder.layer:  # the older release chose a class when it was built
        layer.attention.self = _eager_attention(model, layer.attention.self)
    return list(model.encoder.layer), {}


def _eager_attention(model: Any, old: Any) -> Any:
    name = type(old).__name__
    if not name.endswith("SdpaSelfAttention"):
        return old
    module = __import__(type(old).__module__, fromlist=[""])
    made = getattr(module, name.replace("Sdpa", ""))(model.config).half().eval()
    made.load_state_dict(old.state_dict())
    return made


def first(outcome: Any) -> Tensor:
    return outcome[0] if isinstance(outcome, tuple) else outcome


@torch.no_grad()
def run_layers(model_type: str, backend: RulesBackend) -> tuple[list[Tensor], list[Tensor]]:
    torch._dynamo.reset()
    hidden, mask = half(2, 64, 128), torch.zeros(2, 1, 64, 64).half()
    mask[1, :, :, 50:] = torch.finfo(torch.float16).min / 2
    stack, more = layers(model_type)
    want = [first(layer(hidden, attention_mask=mask, **more)) for layer in stack]
    got = []
    for layer in stack:
        run = torch.compile(layer, backend=backend, fullgraph=True, dynamic=False)
        got.append(first(run(hidden, attention_mask=mask, **more)))
    return want, got


# R13 is real where Inductor fuses, and only a warning since that depends on how it is compiled.
# R9 is real: a rotary half of 32 is half a stick, so such a layer needs padded heads and tables.
EXPECTED = {
    "bert": {("R13", "warning", 1)},
    "llama": {("R13", "warning", 1), ("R9", "error", 2)},
}


@pytest.mark.parametrize("model_type", EXPECTED)
def test_a_layer_has_the_findings_that_are_real_and_runs_with_exactly_eager_numbers(
    model_type: str,
) -> None:
    backend = RulesBackend(SPYRE, on_violation="record")
    want, got = run_layers(model_type, backend)
    assert all(map(torch.equal, want, got))
    # Layers of one class may share their compiled code, with one graph for all.
    graphs = backend.graphs
    assert graphs in (1, 2)
    found = {(f.rule, f.severity, f.count // graphs) for f in backend.report.findings}
    assert found == EXPECTED[model_type]
    for finding in backend.report.findings:
        assert f"modeling_{model_type}.py:" in (finding.source or "")
        assert all((finding.node, finding.shape, finding.dtype))


def test_inductor_runs_a_checked_layer() -> None:
    backend = RulesBackend(SPYRE, then="inductor", on_violation="record")
    want, got = run_layers("bert", backend)
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=1e-2)
    assert backend.report.errors == ()
