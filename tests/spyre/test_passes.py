# SPDX-License-Identifier: Apache-2.0
"""What a report says of a model's passes is what its graphs show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from spyre_models import FAMILIES, MAJOR, causal, converted

from headswap.spyre.executor import Executor

HOST = ("embeddings", "positions", "segments", "rotation", "head")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, list[Any]]]:
    """Graphs and their inputs, which run as they are."""
    seen: list[tuple[Any, list[Any]]] = []

    def compiler(graph: Any, inputs: list[Any]) -> Any:
        seen.append((graph, inputs))
        return graph.forward

    monkeypatch.setattr("headswap.spyre.stack._cpu", lambda name, spec, rules: compiler)
    return seen


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_is_said_to_be_on_the_host_is_in_no_graph(kind: str, graphs: list[Any]) -> None:
    model = converted(kind)
    executor = Executor(model, backend="inductor", shapes=[(2, 64)], dtype=torch.float16).warmup()
    passes = executor.report()["passes"]
    assert [name for name in passes if name in HOST] == list(HOST)
    assert passes["dtype"] == "backbone in torch.float16, head in float32"
    assert "x 32 float16" in passes["embeddings"]
    assert passes["embeddings"].startswith("on the host: ")
    assert passes["head"].startswith("on the host, in float32, on rows pooled by ")
    assert "3 x 32 float32" in passes["head"]
    inputs = {id(tensor) for _, given in graphs for tensor in given}
    backbone = executor.prepared.backbone
    tables = [  # DeBERTa's layers are given its relative positions whole
        m.weight for name, m in backbone.named_modules()
        if isinstance(m, torch.nn.Embedding) and "rel_embeddings" not in name
    ]  # fmt: skip
    outside = [*tables, list(executor.prepared.model.parameters())[-1]]
    assert not inputs & {id(tensor) for tensor in outside}
    inside = any("inv_freq" in str(n) for g, _ in graphs for n in g.graph.nodes)
    assert ("in each layer" in passes["rotation"]) is inside
    assert inside is (MAJOR == 4 and kind == "modernbert")


def test_positions_and_segments_are_those_of_the_model(graphs: list[Any]) -> None:
    given: dict[str, Any] = {"backend": "inductor", "shapes": [(2, 128)]}
    bert = Executor(converted("bert"), **given).report()["passes"]
    who = "the host" if MAJOR > 4 else "the backbone"
    assert bert["segments"] == f"2 kinds, as a caller gives them, else 0 by {who}"
    assert bert["positions"].endswith("a table for 200 tokens")
    assert bert["dtype"] == "backbone in torch.float32, as it was"
    one = Executor(converted("roberta", type_vocab_size=1), **given).report()["passes"]
    assert one["segments"].startswith("1 kind, ")
    if MAJOR > 4:
        assert one["positions"].startswith("from the host, from 2 (behind the pad id)")
    llama = Executor(causal("llama"), **given).report()["passes"]
    assert llama["rotation"].startswith("tables of 4 frequencies (float32) made on the host")
    assert llama["head"] == "on the host: output 99 x 32 float32"
    tied = Executor(causal("gpt2"), **given).report()["passes"]
    assert tied["head"].endswith("tied to the embeddings")
