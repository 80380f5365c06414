# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts run every expert where layers are compiled, and give their own numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from spyre_models import MAJOR, causal, converted, expected, greedy
from tiny_models import rows, tiny

import headswap
from headswap.spyre import Executor
from headswap.spyre.experts import AllExperts, run_all_experts
from headswap.spyre.prepare import prepare

SOME: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                        "num_key_value_heads": 2}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {
    "gpt_oss": {},
    "mixtral": {},
    "qwen2_moe": {**SOME, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 1},
    "qwen3_moe": {**SOME, "head_dim": 8, "norm_topk_prob": True},
    "olmoe": {**SOME, "norm_topk_prob": False},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                 "num_key_value_heads": 2, "first_k_dense_replace": 0, "head_dim": 8,
                 "n_group": 1, "topk_group": 1},
}  # fmt: skip


def mixture(kind: str, **more: Any) -> Any:
    if kind == "gpt_oss":
        return converted(kind, **more)
    source = tiny(kind, max_position_embeddings=200, **MIXTURES[kind], **more)
    torch.manual_seed(1)
    return headswap.as_seq_cls_model(source, num_labels=3).eval()


@pytest.mark.parametrize("backend", ["checked", "inductor"])
@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_is_one_graph_with_its_own_numbers(
    kind: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "inductor":  # as it would be compiled, without the compiler's seconds
        graph: Any = lambda graph, inputs: graph.forward  # noqa: E731
        monkeypatch.setattr("headswap.spyre.stack._cpu", lambda name, spec, rules: graph)
    model, ids = mixture(kind), rows((5, 61, 30, 1))
    executor = Executor(model, backend=backend, rules="record", shapes=[(2, 64)]).warmup()
    torch.testing.assert_close(executor.logits(ids), expected(model, ids), atol=1e-5, rtol=0)
    report = executor.report()
    assert report["compiles"] == 1
    dense = MAJOR == 4 or backend == "checked"
    assert report["passes"].get("experts") == (
        "all of them on every token, in 2 layers" if dense else None
    )


def test_experts_run_as_they_are_where_nothing_is_compiled() -> None:
    executor = Executor(mixture("mixtral"), backend="eager", shapes=[(2, 64)])
    assert "experts" not in executor.report()["passes"]


def test_a_sum_that_is_another_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mixture("mixtral")
    made = prepare(model)
    monkeypatch.setattr("headswap.spyre.experts._spread", lambda index, weights, experts: (
        weights.new_ones(experts, len(weights), 1)))  # fmt: skip
    run_all_experts(made, sorted_too=True)
    assert made.reports[-1].said == "the backbone's own"
    assert not any(isinstance(module, AllExperts) for module in made.backbone.modules())


def test_a_mixture_generates_over_the_paged_cache_in_compiled_layers() -> None:
    model, prompts = causal("gpt_oss"), rows((20, 3))
    executor = Executor(model, backend="checked", rules="record", block_size=64, num_blocks=9,
                        shapes=[(2, 192)]).warmup()  # fmt: skip
    assert executor.generate(prompts, 6) == greedy(model, prompts, 6)
