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
from headswap.registry.errors import InputError
from headswap.spyre import SENDNN, DeviceError
from headswap.spyre.errors import AttentionError, NonFiniteError
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


@pytest.mark.parametrize("how", HOW, ids=str)
def test_segments_reach_the_model_or_are_refused(how: dict[str, Any]) -> None:
    kinds = [[(7 * i + 3) % 2 for i in range(len(row))] for row in IDS]
    model = converted("gpt2")  # which looks them up in its table of words
    with torch.no_grad():
        want = torch.cat([
            model(input_ids=torch.tensor([row]), attention_mask=torch.ones(1, len(row)).long(),
                  token_type_ids=torch.tensor([kind])).logits
            for row, kind in zip(IDS, kinds, strict=True)])  # fmt: skip
    for more in ({}, {"share_prefixes": True}):
        found = Executor(model, backend="eager", **how, **more).logits(IDS, kinds)
        torch.testing.assert_close(found, want, atol=1e-5, rtol=0)
    with pytest.raises(InputError, match="token_type_ids was given"):
        Executor(converted("llama"), backend="eager", **how).logits(IDS, kinds)


@pytest.mark.skipif(MAJOR < 5, reason="4.57's DiffLlama calls attention its own way")
def test_modules_that_call_attention_twice_have_no_pages() -> None:
    source = tiny("diffllama", num_key_value_heads=2, max_position_embeddings=200)
    with pytest.raises(DeviceError, match="paged cache"):
        Executor(source, backend="eager").generate([[5, 6]], 2)
    model = headswap.as_seq_cls_model(source, num_labels=3).eval()
    ids = [[*IDS[1], 5], [*IDS[1], 6, 7]]
    executor = Executor(model, backend="eager", share_prefixes=True)
    torch.testing.assert_close(executor.logits(ids), expected(model, ids), atol=1e-5, rtol=0)


def test_blocks_whose_layers_give_lists_run() -> None:
    model = classifier("openai-gpt", n_positions=200, n_embd=32, n_layer=2, n_head=4)
    torch.testing.assert_close(Executor(model, backend="eager").logits(IDS), expected(model, IDS),
                               atol=1e-5, rtol=0)  # fmt: skip


def test_an_executor_made_under_autocast_learns_the_same() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        executor = Executor(converted("qwen2"), backend="eager", share_prefixes=True)
    assert executor.report()["hooked"]
    assert executor.shares_prefixes


def test_what_stands_around_a_model_is_refused() -> None:
    model = classifier("llama")
    handle = model.register_forward_hook(lambda module, given, found: found)
    with pytest.raises(DeviceError, match="_forward_hooks"):
        Executor(model, backend="eager")
    handle.remove()
    forward = model.forward
    model.forward = lambda *given, **named: forward(*given, **named)
    with pytest.raises(DeviceError, match="a forward of its own"):
        Executor(model, backend="eager")
    del model.forward
    peft = pytest.importorskip("peft")
    prompted = peft.get_peft_model(
        model, peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3)
    )
    with pytest.raises(DeviceError, match="virtual tokens"):
        Executor(prompted, backend="eager")


def test_a_plan_in_which_nothing_can_be_generated_is_refused() -> None:
    with pytest.raises(DeviceError, match="Plan a longer"):
        Executor(causal("llama"), backend="checked", shapes=[(2, 64)], rules="record")


def test_a_backend_of_ones_own_is_compared() -> None:
    from headswap.spyre import ATTENTION
    from headswap.spyre.native import Native

    class Doubled(Native):
        name = "doubled"

        def padded(self, *given: Any) -> torch.Tensor:
            return super().padded(*given) * 2

    ATTENTION.register("doubled", Doubled, replace=True)
    ATTENTION.register("own", Native, replace=True)
    for how in HOW:
        with pytest.raises(AttentionError, match=r"gives .* other numbers"):
            Executor(converted("llama"), backend="eager", attention="doubled", **how)
        executor = Executor(converted("llama"), backend="eager", attention="own", **how)
        want = expected(converted("llama"), IDS)
        torch.testing.assert_close(executor.logits(IDS), want, atol=1e-5, rtol=0)


def test_a_row_that_stops_being_numbers_is_named_and_the_others_are_good() -> None:
    model = copy.deepcopy(causal("llama"))
    model.generation_config.eos_token_id = None
    prompts = [[5, 6, 7], [9, 8, 7], [6, 5]]
    want = greedy(model, prompts, 6)
    with torch.no_grad():
        model.get_input_embeddings().weight[9] = float("nan")
    assert 9 not in [*want[0], *want[2]]
    executor = Executor(model, backend="eager")
    with pytest.raises(NonFiniteError, match=r"Rows \[1\] of 3") as caught:
        executor.generate(prompts, 6)
    assert caught.value.values == [want[0], [], want[2]]
    assert executor.generate(prompts[::2], 6) == want[::2]
    assert executor.report()["blocks"]["held"] == 0


def test_a_model_in_peft_s_wrapper_runs_with_its_adapters() -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    source = copy.deepcopy(causal("qwen2"))
    plain = greedy(source, [[5, 6, 7]], 6)
    adapted = peft.get_peft_model(source, lora).eval()
    want = greedy(source, [[5, 6, 7]], 6)
    assert want != plain
    assert Executor(adapted, backend="eager").generate([[5, 6, 7]], 6) == want
    model = peft.get_peft_model(classifier("bert"), peft.LoraConfig(
        target_modules=["query"], r=2, init_lora_weights=False)).eval()  # fmt: skip
    found = Executor(model, backend="eager").logits(IDS)
    torch.testing.assert_close(found, expected(model, IDS), atol=1e-5, rtol=0)
