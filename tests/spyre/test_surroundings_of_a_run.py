# SPDX-License-Identifier: Apache-2.0
"""What stands around a run and must not reach its numbers: a caller's modes, earlier runs, pads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from spyre_models import DECODERS, MAJOR, MORE, causal, converted, expected, greedy
from tiny_models import rows, tiny

import headswap
from headswap.spyre import SENDNN, DeviceError
from headswap.spyre.errors import AttentionError
from headswap.spyre.executor import Executor

IDS = rows((5, 61, 30, 1, 90))
HOW: list[dict[str, Any]] = [{}, {"shapes": [(3, 128)]}, {"shapes": [(3, 128)], "device": SENDNN}]


def classifier(kind: str, pooling: str | None = None, **more: Any) -> Any:
    auto = "AutoModelForCausalLM" if kind in (*DECODERS, "doge") else "AutoModel"
    sizes = {"max_position_embeddings": 200, **MORE.get(kind, {}), **more}
    how = {} if pooling is None else {"pooling": pooling}
    return headswap.as_seq_cls_model(tiny(kind, auto, **sizes), num_labels=3, **how).eval()


def each_afresh(model: Any, ids: list[list[int]]) -> torch.Tensor:
    return torch.cat([expected(copy.deepcopy(model), [row]) for row in ids])


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("kind", ["gpt2", "bert", "modernbert", "deberta-v2"])
def test_the_search_for_pads_gives_a_row_its_own_numbers(kind: str, how: dict[str, Any]) -> None:
    model = classifier(kind, pooling="compat")
    executor = Executor(model, backend="eager", **how)
    torch.testing.assert_close(executor.logits(IDS), expected(model, IDS), atol=1e-5, rtol=0)
    assert executor.embed(IDS).shape == (5, 32)


@pytest.mark.parametrize("backend", ["eager", "checked", "inductor"])
def test_the_callers_modes_change_no_number_and_leave_nothing_behind(backend: str) -> None:
    model = converted("qwen2")
    want = expected(model, IDS)
    executor = Executor(model, backend=backend, shapes=[(3, 128)], rules="record")
    with torch.inference_mode():
        torch.testing.assert_close(executor.logits(IDS), want, atol=1e-5, rtol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(executor.logits(IDS), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(executor.logits(IDS), want, atol=1e-5, rtol=0)
    assert executor.report()["compiles"] == (0 if backend == "eager" else 1)


def test_a_caller_s_modes_do_not_reach_generated_text() -> None:
    want = greedy(causal("qwen2"), rows((7, 20)), 6)
    executor = Executor(causal("qwen2"), backend="checked", shapes=[(2, 128)], rules="record")
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert executor.generate(rows((7, 20)), 6) == want
    assert executor.generate(rows((7, 20)), 6) == want


def test_a_backbone_that_changes_itself_is_put_back() -> None:
    model = classifier("big_bird", attention_type="block_sparse", block_size=16,
                       num_random_blocks=3, max_position_embeddings=800)  # fmt: skip
    ids = rows((300, 5, 700, 300))
    want = each_afresh(model, ids)
    executor = Executor(model, backend="eager")
    for _ in range(2):  # a short text turns BigBird to full attention, which it keeps
        torch.testing.assert_close(executor.logits(ids), want, atol=1e-5, rtol=0)
        torch.testing.assert_close(executor.logits(ids[1:]), want[1:], atol=1e-5, rtol=0)
    assert "changes itself" in executor.report()["passes"]["settled"]
    assert "settled" not in Executor(converted("bert"), backend="eager").report()["passes"]
    with pytest.raises(DeviceError, match="gives other numbers for a text with pads"):
        Executor(model, backend="eager", shapes=[(2, 768)])


@pytest.mark.skipif(MAJOR < 5, reason="4.57's Doge gives other numbers with pads at any length")
def test_a_bound_between_the_shortest_and_the_longest_shape_is_seen() -> None:
    model = classifier("doge", keep_window_size=180, num_key_value_heads=2,
                       max_position_embeddings=800)  # fmt: skip
    ids = rows((300, 5, 200))
    found = Executor(model, backend="eager").logits(ids)
    torch.testing.assert_close(found, expected(model, ids), atol=1e-5, rtol=0)
    with pytest.raises(DeviceError, match="gives other numbers for a text with pads"):
        Executor(model, backend="eager", shapes=[(2, 64), (2, 512)])


@pytest.mark.parametrize("kind", ["llama", "bert", "mpnet"])
def test_no_rows_have_a_width(kind: str) -> None:
    model = converted(kind)
    for how in HOW:
        executor = Executor(model, backend="eager", **how)
        assert executor.logits([]).shape == (0, 3)
        assert executor.embed([]).shape == (0, 32)


def test_a_model_that_pools_logits_embeds_nothing() -> None:
    model = headswap.as_seq_cls_model(tiny("llama"), num_labels=3, pooling="late").eval()
    with pytest.raises(DeviceError, match="pools no row"):
        Executor(model, backend="eager").embed([[5, 6]])


@pytest.mark.parametrize("backend", ["eager", "checked"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2"])
def test_generated_text_obeys_the_generation_config(kind: str, backend: str) -> None:
    model, prompts = copy.deepcopy(causal(kind)), rows((7, 20))
    plain = greedy(model, prompts, 9)
    shapes = None if backend == "eager" else [(2, 128)]

    def ours() -> list[list[int]]:
        executor = Executor(model, backend=backend, shapes=shapes, rules="record")
        return executor.generate(prompts, 9)

    assert ours() == plain
    for more in (
        {"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[plain[0][0]]]},
        {"suppress_tokens": [plain[0][1]]}, {"begin_suppress_tokens": [plain[0][0]]},
        {"min_new_tokens": 5, "eos_token_id": plain[0][1]},
        {"min_length": 12, "eos_token_id": plain[0][1]},
    ):  # fmt: skip
        for name, value in more.items():
            setattr(model.generation_config, name, value)
        want = greedy(model, prompts, 9)
        assert want != plain
        assert ours() == want
        for name in more:
            setattr(model.generation_config, name, None)


def test_what_changes_greedy_text_and_is_not_done_is_refused() -> None:
    model = copy.deepcopy(causal("llama"))
    model.generation_config.sequence_bias = [[[5], -9.0]]
    with pytest.raises(DeviceError, match=r"sequence_bias=.* Set it to None"):
        Executor(model, backend="eager").generate([[5, 6]], 2)


def test_attention_without_pages_is_refused_by_name_and_none_takes_its_place() -> None:
    with pytest.raises(AttentionError, match="'packed' has no paged mode"):
        Executor(causal("llama"), backend="eager", attention="packed")
    executor = Executor(causal("llama"), backend="eager")
    executor.generate([[5, 6]], 2)
    assert executor.report()["attention"] == "sdpa"


def test_an_adapter_that_is_switched_later_is_refused() -> None:
    peft = pytest.importorskip("peft")
    model = classifier("llama")
    lora = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    adapted = peft.get_peft_model(model, lora)
    executor = Executor(model, backend="eager")
    torch.testing.assert_close(executor.logits(IDS), expected(model, IDS), atol=1e-5, rtol=0)
    with adapted.disable_adapter(), pytest.raises(DeviceError, match="Make a new Executor"):
        executor.logits(IDS)
    executor.logits(IDS)
