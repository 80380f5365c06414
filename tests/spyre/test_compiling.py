# SPDX-License-Identifier: Apache-2.0
"""Graphs: one a shape, none after warm-up, and a card's stack is driven in its order."""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import pytest
import torch
from spyre_models import FAMILIES, MAJOR, causal, converted, expected, greedy
from tiny_models import rows

from headswap.spyre import SENDNN, SPYRE, compiling
from headswap.spyre.compiling import Guarded, compile_layers, outer_layers
from headswap.spyre.errors import CompileError, DeviceError, RuleError
from headswap.spyre.executor import Executor
from headswap.spyre.stack import Backend, choose

SHAPES = [(4, 64), (1, 128)]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The inductor backend replaced by running graphs as they are, which takes seconds less; the
    graphs that were compiled."""
    graphs: list[Any] = []

    def compiler(graph: Any, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr("headswap.spyre.stack._cpu", lambda name, spec, rules: compiler)
    return graphs


TWO = ("modernbert",) if MAJOR > 4 else ("modernbert", "gemma3_text")
"""Families whose layers are of two kinds: one without its first norm; in 4.57 also one that picks
its own rotation tables."""


@pytest.mark.parametrize(
    ("kind", "device"),
    [*((kind, SPYRE) for kind in FAMILIES), ("llama", SENDNN), ("bert", SENDNN)],
    ids=lambda value: getattr(value, "dialect", value),
)
def test_one_graph_a_kind_of_layer_and_shape_and_none_later(
    kind: str, device: Any, eager: list[Any]
) -> None:
    model, ids = converted(kind), rows((5, 61, 30, 30, 1, 90))
    executor = Executor(model, backend="inductor", shapes=SHAPES, device=device).warmup()
    warm = executor.report()["compiles"]
    assert warm == len(SHAPES) * (2 if kind in TWO else 1)
    torch.testing.assert_close(executor.logits(ids), expected(model, ids), atol=1e-5, rtol=0)
    for lengths in ((1,), (64, 2, 3), (64, 64, 64, 64), (128,), (17, 18, 19, 20, 21), (127, 64)):
        ids = rows(lengths)
        torch.testing.assert_close(executor.logits(ids), expected(model, ids), atol=1e-5, rtol=0)
    assert executor.report()["compiles"] == warm == len(eager)
    assert all(not any(node.op == "call_module" for node in graph.graph.nodes) for graph in eager)


def test_depth_costs_no_graphs(eager: list[Any]) -> None:
    deep = converted("llama", num_hidden_layers=6)
    assert Executor(deep, backend="inductor", shapes=SHAPES).warmup().report()["compiles"] == 2


@pytest.mark.parametrize("kind", ["llama", "modernbert"])
def test_inductor_equals_eager_on_padded_rows(kind: str) -> None:
    model, ids = converted(kind), rows((3, 20, 64, 90))
    executor = Executor(model, backend="inductor", shapes=SHAPES).warmup()
    before = executor.report()["compiles"]
    torch.testing.assert_close(executor.logits(ids), expected(model, ids), atol=1e-5, rtol=0)
    assert executor.report()["compiles"] == before


@pytest.mark.parametrize("attention", ["native", "operators"])
def test_generation_compiles_a_chunk_and_a_step(attention: str, eager: list[Any]) -> None:
    model, prompts = causal("qwen3"), rows((20, 3, 70, 1))
    executor = Executor(model, backend="inductor", attention=attention, block_size=64,
                        shapes=[(2, 192)], num_blocks=13).warmup()  # fmt: skip
    assert executor.report()["compiles"] == 2
    assert executor.generate(prompts, 8) == greedy(model, prompts, 8)
    assert executor.report()["compiles"] == 2


def test_a_compile_after_warm_up_names_the_shape_and_the_plan(eager: list[Any]) -> None:
    executor = Executor(converted("llama"), backend="inductor", shapes=SHAPES).warmup()
    torch._dynamo.reset()
    with pytest.raises(CompileError, match=r"shape 1 x 128 after warm-up; planned were 4"):
        executor.logits(rows((5,)))


def test_a_model_that_is_no_single_graph_is_refused_with_the_reason(eager: list[Any]) -> None:
    model = converted("llama")
    executor = Executor(model, backend="inductor", shapes=SHAPES)
    for layer in outer_layers(executor.prepared.backbone):
        inner: Any = layer.forward.args[2]  # type: ignore[attr-defined]
        before = inner.mlp.forward
        inner.mlp.forward = lambda x, before=before: before(x) if x.sum().item() else x
    with pytest.raises(CompileError, match="backend='eager'"):
        executor.warmup()


def test_two_executors_do_not_share_their_graphs(eager: list[Any]) -> None:
    model = converted("qwen2")
    for _ in range(3):
        assert Executor(model, backend="inductor", shapes=SHAPES).warmup().report()[
            "compiles"] == 2  # fmt: skip


def test_layers_are_found_where_a_backbone_keeps_them() -> None:
    assert len(outer_layers(converted("bert").backbone)) == 2
    assert len(outer_layers(converted("opt").backbone)) == 2
    nested = torch.nn.ModuleDict({"a": torch.nn.ModuleList([torch.nn.Linear(2, 2)])})
    assert compile_layers(nested, Guarded(lambda g, i: g.forward), 8) == 1


def test_states_stay_on_the_device_from_layer_to_layer(
    eager: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[str] = []
    real = compiling._moved

    def noted(values: Any, device: str) -> Any:
        moved.append(device)
        return real(values, device)

    monkeypatch.setattr(compiling, "_moved", noted)
    monkeypatch.setattr(Backend, "device", "cpu:0")
    model, ids = converted("bert"), rows((5, 30))
    executor = Executor(model, backend="inductor", shapes=[(2, 64)]).warmup()
    del moved[:]
    torch.testing.assert_close(executor.logits(ids), expected(model, ids), atol=1e-5, rtol=0)
    assert moved == ["cpu:0"] * 4 + ["cpu"]  # two layers' arguments and keywords, then the end
    generating = Executor(causal("llama"), backend="inductor", shapes=[(2, 128)])
    with pytest.raises(DeviceError, match="paged cache lies on the host"):
        generating.generate([[5, 6]], 2)


# -- a stand-in for the card's stack --------------------------------------------------------------


@pytest.fixture
def sendnn(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A module `torch_sendnn` that notes what happens to it, and the notes."""
    notes: list[str] = []
    sys.modules["sendnn_notes"] = notes_module = types.ModuleType("sendnn_notes")
    notes_module.notes = notes  # type: ignore[attr-defined]
    (tmp_path / "torch_sendnn.py").write_text(
        "import os, contextlib, torch\n"
        "from sendnn_notes import notes\n"
        "notes.append('import ' + os.environ['VLLM_DT_MAX_BATCH_TKV_LIMIT'])\n"
        "def sendnn(graph, inputs, options):\n"
        "    assert options == {'sendnn.dynamic': False}, options\n"
        "    notes.append('compile')\n"
        "    def run(*given):\n"
        "        notes.append('run')\n"
        "        return graph(*given)\n"
        "    return run\n"
        "torch._dynamo.register_backend(sendnn, name='sendnn')\n"
        "@contextlib.contextmanager\n"
        "def warmup_mode():\n"
        "    notes.append('enter')\n"
        "    yield\n"
        "    notes.append('leave')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield notes
    for name in ("torch_sendnn", "sendnn_notes"):
        sys.modules.pop(name, None)
    torch._dynamo.backends.registry._COMPILER_FNS.pop("sendnn", None)


def test_the_stack_is_driven_in_its_order(sendnn: list[str]) -> None:
    model, ids = converted("bert"), rows((5, 61, 90))
    executor = Executor(model, backend="sendnn", shapes=SHAPES, rules="record")
    assert "VLLM_DT_MAX_BATCH_TKV_LIMIT" not in os.environ
    assert sendnn == ["import 131072"]
    executor.warmup()
    order = [note for i, note in enumerate(sendnn) if not i or sendnn[i - 1] != note]
    assert order[:3] == ["import 131072", "enter", "compile"]
    assert order.count("leave") == 1
    inside, outside = sendnn[: sendnn.index("leave")], sendnn[sendnn.index("leave") + 1 :]
    assert "compile" in inside
    assert set(outside) == {"run"}  # the deploy pass: every shape once more, nothing compiled
    assert len(outside) == inside.count("run")
    torch.testing.assert_close(executor.logits(ids), expected(model, ids), atol=1e-5, rtol=0)
    assert executor.backend.spec.pad_side == "left"
    assert "compile" not in sendnn[len(inside) :]


def test_a_card_s_graphs_are_given_what_its_rules_say(sendnn: list[str]) -> None:
    with pytest.raises(RuleError, match=r"inputs of a run break rules of sendnn.*\n.*float32"):
        Executor(converted("bert"), backend="sendnn", shapes=SHAPES).warmup()
    half = Executor(converted("llama"), backend="sendnn", shapes=SHAPES, dtype=torch.float16)
    assert half.logits(rows((5, 90))).shape == (2, 3)
    assert half.report()["rules"]["findings"] == []


def test_the_newer_stack_compiles_without_fusing_attention(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch_spyre.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("torch._dynamo.lookup_backend", lambda name: (name,))
    seen: list[Any] = []
    monkeypatch.setattr("headswap.spyre.stack.partial", lambda *a, **n: seen.append((a, n)))
    try:
        choose("spyre", None, "raise")
    finally:
        sys.modules.pop("torch_spyre", None)
    assert seen == [((("inductor",),), {"config_patches": {"pattern_matcher": False}})]


def test_auto_takes_the_stack_where_it_is(sendnn: list[str]) -> None:
    assert choose("auto", None, "raise").name == "sendnn"
    assert choose("auto", None, "raise").on_card


def test_auto_without_a_stack_is_eager() -> None:
    assert choose("auto", None, "raise").name == "eager"
    with pytest.raises(DeviceError, match="limits of dialect"):
        choose("sendnn", SPYRE, "raise")
