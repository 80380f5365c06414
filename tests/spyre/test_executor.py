# SPDX-License-Identifier: Apache-2.0
"""An executor gives each row's own logits, in packs, rectangles and pages, and leaves the model."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from spyre_models import (
    DECODERS,
    FAMILIES,
    MAJOR,
    OWN,
    causal,
    converted,
    expected,
    greedy,
    pressing_keys,
)  # fmt: skip
from tiny_models import alone, rows, tiny

import headswap
from headswap.spyre import SENDNN, SPYRE, ShapeError
from headswap.spyre.errors import AttentionError, CapacityError, DeviceError, NonFiniteError
from headswap.spyre.executor import Executor
from headswap.spyre.linears import usable

LENGTHS = (5, 61, 30, 30, 1, 90)


@pytest.mark.parametrize("kind", FAMILIES)
def test_packs_and_rectangles_equal_each_row_alone(kind: str) -> None:
    model, ids = converted(kind), rows(LENGTHS)
    want = expected(model, ids)
    how: list[dict[str, Any]] = [
        {}, {"shapes": [(2, 64), (1, 128)]}, {"shapes": [(4, 128)], "attention": "native"},
        {"shapes": [(3, 64), (3, 128)], "device": SENDNN}, {"shapes": [(8, 128)], "device": SPYRE},
    ]  # fmt: skip
    for given in how:
        executor = Executor(model, backend="eager", **given)
        torch.testing.assert_close(executor.logits(ids), want, atol=1e-5, rtol=0)
    if MAJOR > 4 or kind in DECODERS[:8]:
        assert Executor(model, backend="eager").report()["hooked"] is (kind not in OWN)


@pytest.mark.parametrize("kind", ["llama", "bert", "modernbert", "deberta-v2"])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128])
def test_any_head_size_runs(kind: str, head_dim: int) -> None:
    model = converted(kind, hidden_size=2 * head_dim, num_attention_heads=2,
                      **({"num_key_value_heads": 1} if kind == "llama" else {}))  # fmt: skip
    ids = rows((5, 20))
    for given in ({}, {"shapes": [(2, 64)]}):
        found = Executor(model, backend="eager", **given).logits(ids)  # type: ignore[arg-type]
        torch.testing.assert_close(found, expected(model, ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", FAMILIES)
def test_half_precision_keeps_the_direction_and_the_winner(kind: str) -> None:
    model, ids = converted(kind), rows(LENGTHS)
    want = expected(model, ids)
    executor = Executor(model, backend="eager", shapes=[(2, 128)], dtype=torch.float16)
    found = executor.logits(ids)
    assert found.dtype == torch.float32
    assert float(torch.nn.functional.cosine_similarity(found, want).min()) >= 0.999
    close = want.topk(2).values.diff().abs().squeeze(1) < 1e-2  # two labels level within rounding
    assert bool(((found.argmax(1) == want.argmax(1)) | close).all())
    assert next(model.backbone.parameters()).dtype == torch.float32


def test_the_model_is_left_as_it_was() -> None:
    model, ids = converted("bert"), rows((4, 9))
    before = expected(model, ids)
    config, weights = model.config.to_dict(), {n: p.data_ptr() for n, p in model.named_parameters()}
    kinds = {name: type(module) for name, module in model.named_modules()}
    model.train()
    executor = Executor(model, backend="eager", shapes=[(2, 64)], dtype=torch.float16)
    executor.logits(ids)
    assert model.training
    model.eval()
    assert model.config.to_dict() == config
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == weights
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    torch.testing.assert_close(expected(model, ids), before, atol=0, rtol=0)


def test_a_packs_segments_reach_the_embeddings() -> None:
    model, ids = converted("bert"), rows((6, 4))
    kinds = [[0, 0, 0, 1, 1, 1], [0, 1, 1, 1]]
    with torch.no_grad():
        want = torch.cat([
            model(input_ids=torch.tensor([r]), attention_mask=torch.ones(1, len(r)).long(),
                  token_type_ids=torch.tensor([k])).logits
            for r, k in zip(ids, kinds, strict=True)])  # fmt: skip
    assert not torch.allclose(want, expected(model, ids), atol=1e-3)
    for given in ({}, {"shapes": [(2, 64)]}):
        found = Executor(model, backend="eager", **given).logits(ids, kinds)  # type: ignore[arg-type]
        torch.testing.assert_close(found, want, atol=1e-5, rtol=0)


def test_a_pad_id_inside_a_text_counts_as_the_reference_counts_it() -> None:
    model = converted("roberta")
    ids = [[7, 1, 8, 9], [5, 6]]
    for given in ({}, {"shapes": [(2, 64)]}, {"shapes": [(2, 64)], "device": SENDNN}):
        found = Executor(model, backend="eager", **given).logits(ids)  # type: ignore[arg-type]
        torch.testing.assert_close(found, expected(model, ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_every_pooling_rule_runs_in_packs(pooling: str) -> None:
    source = tiny("qwen2", "AutoModelForCausalLM")
    model = headswap.as_seq_cls_model(source, num_labels=2, pooling=pooling).eval()
    ids = rows((5, 9, 1))
    for given in ({}, {"shapes": [(3, 64)]}):
        found = Executor(model, backend="eager", **given).logits(ids)  # type: ignore[arg-type]
        torch.testing.assert_close(found, expected(model, ids), atol=1e-5, rtol=0)


def test_embeddings_and_pooled_states() -> None:
    source = tiny("bert", "AutoModel")
    model = headswap.as_embedding_model(source, pooling="mean").eval()
    ids = rows((5, 9, 1))
    with torch.no_grad():
        want = torch.cat([model(input_ids=torch.tensor([r])).pooler_output for r in ids])
    torch.testing.assert_close(Executor(model, backend="eager").embed(ids), want, atol=1e-5, rtol=0)
    classifier = converted("llama")
    rows_ = Executor(classifier, backend="eager").embed(ids)
    with torch.no_grad():
        logits = classifier.logits_of(rows_)
    torch.testing.assert_close(logits, expected(classifier, ids), atol=1e-5, rtol=0)


def test_equal_rows_run_once() -> None:
    model, ids = converted("bert"), rows((5, 9))
    executor = Executor(model, backend="eager")
    found = executor.logits([ids[0], ids[1], ids[0], ids[0]])
    torch.testing.assert_close(found, expected(model, ids)[[0, 1, 0, 0]], atol=1e-5, rtol=0)
    assert executor.report()["tokens"] == 14
    kinds = [[0] * 5, [0] * 9, [1] * 5, [0] * 5]
    parted = executor.logits([ids[0], ids[1], ids[0], ids[0]], kinds)
    assert not torch.allclose(parted[2], parted[0], atol=1e-3)
    torch.testing.assert_close(parted[3], parted[0], atol=0, rtol=0)


# -- refusals -------------------------------------------------------------------------------------


def test_a_long_row_is_refused_with_both_numbers_and_the_next_call_works() -> None:
    model = converted("bert")
    executor = Executor(model, backend="eager", shapes=[(2, 64)])
    before = executor.logits(rows((10,)))
    with pytest.raises(ShapeError, match="65 tokens, the longest shape 64"):
        executor.logits(rows((65, 3)))
    torch.testing.assert_close(executor.logits(rows((10,))), before, atol=0, rtol=0)
    with pytest.raises(ShapeError, match="201 tokens; the model takes 200"):
        Executor(model, backend="eager").logits(rows((201,)))
    assert Executor(converted("roberta"), backend="eager").logits(rows((198,))).shape == (1, 3)
    with pytest.raises(ShapeError, match="takes 198"):
        Executor(converted("roberta"), backend="eager").logits(rows((199,)))


@pytest.mark.parametrize("bad", [[[]], [[1, 2], []], [[1.5]], [["a"]], [[True]]])
def test_rows_that_are_no_ids_are_refused(bad: Any) -> None:
    with pytest.raises(ShapeError):
        Executor(converted("llama"), backend="eager").logits(bad)


def test_segments_must_fit_their_rows() -> None:
    with pytest.raises(ShapeError, match="differ in their lengths"):
        Executor(converted("bert"), backend="eager").logits([[5, 6]], [[0]])


def test_no_rows_give_no_logits() -> None:
    assert Executor(converted("bert"), backend="eager").logits([]).shape == (0, 3)


def test_what_a_backend_cannot_do_is_refused_at_the_start_by_name() -> None:
    with pytest.raises(AttentionError, match=r"needs softcap, which .* 'sdpa' does not support"):
        Executor(converted("gemma2"), backend="eager", attention="sdpa", shapes=[(1, 64)])
    with pytest.raises(AttentionError, match="sinks"):
        Executor(converted("gpt_oss"), backend="eager", attention="sdpa", shapes=[(1, 64)])
    with pytest.raises(AttentionError, match="has no padded mode"):
        Executor(converted("bert" if MAJOR > 4 else "llama"), backend="eager", attention="packed",
                 shapes=[(1, 64)])  # fmt: skip
    with pytest.raises(AttentionError, match="did you mean native"):
        Executor(converted("bert"), backend="eager", attention="natve")


def test_rows_that_pads_change_are_refused_rectangles() -> None:
    source = tiny("convbert", "AutoModel", embedding_size=32)
    model = headswap.as_seq_cls_model(source, num_labels=2).eval()
    with pytest.raises(DeviceError, match="gives other numbers for a text with pads"):
        Executor(model, backend="eager", shapes=[(2, 64)])
    ids = rows((5, 9, 5))
    found = Executor(model, backend="eager").logits(ids)
    torch.testing.assert_close(found, expected(model, ids), atol=1e-5, rtol=0)


def test_an_unknown_backend_and_a_missing_stack_are_refused() -> None:
    with pytest.raises(DeviceError, match="known: auto, eager"):
        Executor(converted("bert"), backend="cuda")
    with pytest.raises(DeviceError, match="needs torch_sendnn, which is not installed"):
        Executor(converted("bert"), backend="sendnn")
    with pytest.raises(DeviceError, match="runs models of headswap"):
        Executor(torch.nn.Linear(2, 2))


def test_a_row_that_is_not_finite_is_named_and_the_others_are_good() -> None:
    model = converted("bert", initializer_range=0.03)
    want = expected(model, [[5, 6], [8, 9]])
    with torch.no_grad():
        model.backbone.embeddings.word_embeddings.weight[7] = float("inf")
    for given in ({}, {"shapes": [(3, 64)]}):
        executor = Executor(model, backend="eager", **given)  # type: ignore[arg-type]
        with pytest.raises(NonFiniteError, match=r"Rows \[1\] of 3") as error:
            executor.logits([[5, 6], [7, 6], [8, 9]])
        assert error.value.rows == (1,)
        values: Any = error.value.values
        torch.testing.assert_close(values[[0, 2]], want, atol=1e-5, rtol=0)
        torch.testing.assert_close(executor.logits([[5, 6], [8, 9]]), want, atol=1e-5, rtol=0)


def test_rows_keep_their_order_whatever_their_company() -> None:
    model = converted("qwen3")
    ids = rows((7, 3, 12, 5, 3, 30))
    want = expected(model, ids)
    executor = Executor(model, backend="eager", shapes=[(2, 64), (4, 64)])
    packs = Executor(model, backend="eager")
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        order = torch.randperm(6, generator=generator).tolist()
        for size in (1, 2, 3, 6):
            chosen = order[:size]
            for run in (executor, packs):
                found = run.logits([ids[i] for i in chosen])
                torch.testing.assert_close(found, want[chosen], atol=1e-5, rtol=0)


def test_threads_share_an_executor() -> None:
    model = converted("llama")
    executor = Executor(model, backend="eager")
    ids = [rows((n, 3), seed=n) for n in range(1, 9)]
    want = [expected(model, each) for each in ids]
    found: list[Any] = [None] * 8

    def work(i: int) -> None:
        for _ in range(5):
            found[i] = executor.logits(ids[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for one, two in zip(found, want, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=0)


def test_the_report_says_what_ran() -> None:
    executor = Executor(converted("llama"), backend="eager", shapes=[(2, 64)])
    executor.logits(rows((10, 20, 34)))
    report = executor.report()
    assert report["rows"] == 3
    assert report["tokens"] == 64
    assert report["computed"] == 256
    assert report["waste"] == 0.75
    assert report["runs"] == {"2 x 64": 2}
    assert report["passes"]["attention"] == "ours, 2 calls"


# -- generation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["native", "sdpa", "operators", "reference"])
@pytest.mark.parametrize("kind", DECODERS)
def test_greedy_text_equals_transformers(kind: str, attention: str) -> None:
    model = causal(kind)
    try:
        executor = Executor(model, backend="eager", attention=attention, block_size=64)
    except AttentionError:
        assert attention == "sdpa"
        assert kind in ("gemma2", "gpt_oss")
        return
    if MAJOR == 4 and not executor.prepared.causal:
        assert kind == "opt"  # its mask does not come to us there
        return
    prompts = rows((20, 3, 70))
    assert executor.generate(prompts, 12) == greedy(model, prompts, 12)
    assert executor.report()["blocks"]["held"] == 0


def small(num_blocks: int | None = None, **limits: Any) -> Executor:
    device = replace(SPYRE, block_size=64, chunk=64, max_decode_batch=4, **limits)
    return Executor(causal("qwen3"), backend="eager", attention="native", block_size=64,
                    device=device, num_blocks=num_blocks)  # fmt: skip


def test_a_known_prefix_is_shared_and_changes_nothing() -> None:
    model = causal("qwen3")
    prompt = rows((150,))[0]
    prompts = [prompt[:130] + tail for tail in ([5, 6, 7], [9], [20, 21])]
    executor = small()
    want = greedy(model, prompts, 8)
    assert executor.generate(prompts, 8) == want
    assert executor.report()["blocks"]["tokens_shared"] == 256
    assert executor.generate(prompts, 8) == want
    assert executor.report()["blocks"]["tokens_shared"] == 256 + 384


def test_rows_together_stay_within_the_devices_volume() -> None:
    prompts = rows((60, 20, 50, 10))
    executor = small(max_volume=256)  # two rows of 128
    most: list[int] = []
    pages: Any = executor._pages.room(prompts, 8)
    step = pages.step
    pages.step = lambda live, run: most.append(len(live)) or step(live, run)
    assert executor.generate(prompts, 8) == greedy(causal("qwen3"), prompts, 8)
    assert max(most) == 2


def test_what_stands_on_pads_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = converted("bert"), rows((5, 30))
    executor = Executor(model, backend="eager", shapes=[(4, 64)])
    before = executor.logits(ids)
    monkeypatch.setattr(type(executor.prepared), "pad", 77)
    torch.testing.assert_close(executor.logits(ids), before, atol=1e-6, rtol=0)
    with torch.no_grad():  # states on pads a hundred times as large
        model.backbone.embeddings.word_embeddings.weight[77] *= 100
    try:
        again = Executor(model, backend="eager", shapes=[(4, 64)])
        torch.testing.assert_close(again.logits(ids), before, atol=1e-5, rtol=0)
    finally:
        with torch.no_grad():
            model.backbone.embeddings.word_embeddings.weight[77] /= 100


def test_large_ids_keep_their_value() -> None:
    model = converted("bert", vocab_size=70_001, hidden_size=8, num_attention_heads=2)
    ids = [[70_000, 5], [69_999, 5], [4_464, 5]]  # the last is 70,000 in 16 bits
    for given in ({}, {"shapes": [(4, 64)]}):
        found = Executor(model, backend="eager", **given).logits(ids)  # type: ignore[arg-type]
        torch.testing.assert_close(found, expected(model, ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("chunk", [256, 512])
def test_neither_blocks_nor_chunks_change_a_number(size: int, chunk: int) -> None:
    model, ids = converted("mistral"), rows((130, 5, 64, 190))
    device = replace(SPYRE, block_size=size, chunk=chunk)
    executor = Executor(model, backend="eager", device=device, share_prefixes=True)
    torch.testing.assert_close(executor.logits(ids), expected(model, ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("chunk", [64, 128])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gpt2"])
def test_classified_rows_share_their_prefix(kind: str, chunk: int) -> None:
    model, long = converted(kind), rows((150,))[0]
    ids = [long[:130] + tail for tail in ([5, 6, 7], [9], [20] * 40)] + [long[:3], long]
    device = replace(SPYRE, block_size=64, chunk=chunk)
    executor = Executor(model, backend="eager", device=device, share_prefixes=True, num_blocks=9)
    want = expected(model, ids)
    for _ in range(2):
        torch.testing.assert_close(executor.logits(ids), want, atol=1e-5, rtol=0)
    assert executor.report()["blocks"]["tokens_shared"] == (3 + 4) * 128
    pages: Any = executor._pages.paged
    for block in range(9):  # what no row holds or knows may be anything
        if block and pages.pool._blocks[block].key is None:
            for layer in pages.cache.layers:
                layer.key[block] = layer.value[block] = float("nan")
    torch.testing.assert_close(executor.logits(ids), want, atol=1e-5, rtol=0)


def test_prefixes_are_not_shared_where_that_would_be_wrong() -> None:
    for model in (converted("bert"), headswap.as_seq_cls_model(
            causal("llama"), num_labels=2, pooling="mean").eval()):  # fmt: skip
        executor = Executor(model, backend="eager", share_prefixes=True)
        assert executor.report()["shares_prefixes"] is False
        ids = rows((5, 9))
        torch.testing.assert_close(executor.logits(ids), expected(model, ids), atol=1e-5, rtol=0)


def test_few_blocks_make_prompts_wait_and_too_few_are_refused_before_any_work() -> None:
    model = causal("qwen3")
    prompts = rows((60, 20, 70, 10))
    executor = small(num_blocks=4)
    assert executor.generate(prompts, 8) == greedy(model, prompts, 8)
    with pytest.raises(CapacityError, match="holds 192") as error:
        executor.generate([[5, 6], rows((190,))[0]], 8)
    assert error.value.needed == 198
    assert executor.report()["blocks"]["held"] == 0
    with pytest.raises(CapacityError, match="the context holds"):
        small(max_context=128).generate([[5] * 100], 20)


def test_what_freed_blocks_hold_does_not_matter() -> None:
    model, prompts = causal("qwen3"), rows((60, 20))
    executor = small(num_blocks=6)
    want = greedy(model, prompts, 8)
    assert executor.generate(prompts, 8) == want
    pages: Any = executor._pages.paged
    for layer in pages.cache.layers:
        layer.key.fill_(float("nan"))
        layer.value.fill_(float("nan"))
    pages.pool.forget()
    assert executor.generate(prompts, 8) == want


def test_blocks_are_given_back_after_an_error() -> None:
    executor = small(num_blocks=8)
    executor.generate([[5, 6, 7]], 2)
    model: Any = executor.prepared.model
    forward, calls = model.forward, []

    def failing(*args: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return forward(*args, **named)

    model.forward = failing
    with pytest.raises(KeyboardInterrupt):
        executor.generate(rows((20, 30)), 10)
    assert executor.report()["blocks"]["held"] == 0
    model.forward = forward
    assert executor.generate([[5, 6, 7]], 2) == greedy(causal("qwen3"), [[5, 6, 7]], 2)


def test_a_classifier_does_not_generate_and_a_causal_model_does_not_classify() -> None:
    with pytest.raises(DeviceError, match="has no output embedding"):
        Executor(converted("llama"), backend="eager").generate([[5]], 2)
    with pytest.raises(DeviceError, match="has no classification head"):
        Executor(causal("llama"), backend="eager").logits([[5]])
    with pytest.raises(DeviceError, match="cannot run over a paged cache"):
        Executor(converted("bert"), backend="eager").generate([[5]], 2)
    assert Executor(causal("llama"), backend="eager").generate([[5]], 0) == [[]]


def test_an_end_mark_ends_a_text() -> None:
    model = causal("llama")
    executor = Executor(model, backend="eager", block_size=64)
    first = executor.generate([[5, 6, 7]], 6)[0]
    assert executor.generate([[5, 6, 7]], 6, eos_token_id=first[2])[0] == first[:3]


def test_layers_that_read_a_linear_s_weight_themselves_find_it() -> None:
    source = tiny("jamba", "AutoModelForCausalLM", num_key_value_heads=2, attn_layer_period=2,
                  attn_layer_offset=1, use_mamba_kernels=False, num_experts=2)  # fmt: skip
    model, ids = headswap.as_seq_cls_model(source, num_labels=3).eval(), rows((5, 30))
    found = Executor(model, backend="eager").logits(ids)
    torch.testing.assert_close(found, expected(model, ids), atol=1e-5, rtol=0)


def test_a_linear_whose_forward_was_replaced_keeps_it() -> None:
    source = tiny("llama", "AutoModelForCausalLM")
    model, ids = headswap.as_seq_cls_model(source, num_labels=3).eval(), rows((5, 9))
    before = expected(model, ids)
    layer: Any = model.backbone.layers[0].mlp.down_proj
    plain = layer.forward
    layer.forward = lambda states: 2 * plain(states)
    want = expected(model, ids)
    assert not torch.allclose(want, before, atol=1e-3)
    found = Executor(model, backend="eager").logits(ids)
    torch.testing.assert_close(found, want, atol=1e-5, rtol=0)


SCALED: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 4.0}, "longrope": {"factor": 4.0, "short_factor": [1.0] * 4,
                                             "long_factor": [2.0, 3.0, 4.0, 5.0],
                                             "original_max_position_embeddings": 128},
}  # fmt: skip


def scaled(kind: str) -> Any:
    """A decoder whose RoPE changes beyond 128 tokens."""
    given = {"rope_type": kind, "rope_theta": 10000.0, **SCALED[kind]}
    more: dict[str, Any] = {"max_position_embeddings": 128, "num_key_value_heads": 2}
    if kind == "longrope":
        more |= {"max_position_embeddings": 512, "original_max_position_embeddings": 128}
    if kind == "longrope" and MAJOR == 4:
        given = {"type": kind, **{k: v for k, v in SCALED[kind].items() if k.endswith("factor")
                                  and k != "factor"}}  # fmt: skip
    more["rope_parameters" if MAJOR > 4 else "rope_scaling"] = given
    return tiny("phi3" if kind == "longrope" else "llama", "AutoModelForCausalLM", **more)


@pytest.mark.parametrize("kind", SCALED)
def test_rope_that_depends_on_the_longest_row_changes_no_other_row(kind: str) -> None:
    source = scaled(kind)
    model = headswap.as_seq_cls_model(source, num_labels=3).eval()
    ids = rows((200, 5, 30, 128))
    want = expected(model, ids)
    executor = Executor(model, backend="eager")
    if kind == "longrope":
        torch.testing.assert_close(executor.logits(ids), want, atol=1e-5, rtol=0)
    else:
        with pytest.raises(ShapeError, match="longest text that ran before"):
            executor.logits(ids)
    torch.testing.assert_close(executor.logits(ids[1:]), want[1:], atol=1e-5, rtol=0)
    with pytest.raises(DeviceError, match="Beyond 128 tokens"):
        Executor(model, backend="eager", shapes=[(2, 256)])
    planned = Executor(model, backend="eager", shapes=[(4, 128)])
    torch.testing.assert_close(planned.logits(ids[1:]), want[1:], atol=1e-5, rtol=0)
    with pytest.raises((CapacityError, ShapeError), match="128"):
        Executor(source, backend="eager").generate(ids[2:3], 100)


def test_running_an_executor_does_not_turn_the_model_s_own_frequencies() -> None:
    model = headswap.as_seq_cls_model(scaled("longrope"), num_labels=3).eval()
    expected(model, rows((5,)))
    before = {name: tensor.clone() for name, tensor in model.named_buffers()}
    Executor(model, backend="eager").logits(rows((200,)))
    for name, tensor in model.named_buffers():
        torch.testing.assert_close(tensor, before[name], atol=0, rtol=0)


def test_a_shape_beyond_the_table_of_positions_is_refused_where_pads_need_positions() -> None:
    source = tiny("gpt_neo", "AutoModelForCausalLM", num_heads=4, num_layers=2,
                  attention_types=[[["global"], 2]])  # fmt: skip
    model = headswap.as_seq_cls_model(source, num_labels=3).eval()
    with pytest.raises(DeviceError, match="has positions for 64"):
        Executor(model, backend="eager", shapes=[(2, 128)])


def test_new_tokens_beyond_the_table_of_positions_are_refused_before_any_work() -> None:
    with pytest.raises(ShapeError, match="210 tokens with the new ones; the model takes 200"):
        Executor(causal("gpt2"), backend="eager").generate(rows((190,)), 20)


def test_ids_that_no_table_knows_and_a_bare_row_are_refused_by_row() -> None:
    executor = Executor(converted("bert"), backend="eager")
    for bad in ([[5, 6], [7, 99]], [[5, 6], [-1, 7]]):
        with pytest.raises(ShapeError, match=r"Row 1 holds the id .* 0 to 98") as error:
            executor.logits(bad)
        assert error.value.rows == (1,)
    with pytest.raises(ShapeError, match="Row 0 holds the token_type_id 5"):
        executor.logits([[5, 6]], [[0, 5]])
    with pytest.raises(ShapeError, match="Give a list of rows"):
        executor.logits([5, 6, 7])  # type: ignore[list-item]


def test_low_precision_leaves_rope_s_frequencies() -> None:
    model = converted("llama")
    executor = Executor(model, backend="eager", dtype=torch.bfloat16)
    found = {n: t for n, t in executor.prepared.model.named_buffers() if n.endswith("inv_freq")}
    assert found
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, dict(model.named_buffers())[name], atol=0, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_a_causal_model_generates_in_low_precision(tied: bool) -> None:
    model = tiny("llama", tie_word_embeddings=tied)
    found = Executor(model, backend="eager", dtype=torch.bfloat16).generate(rows((5, 9)), 3, ())
    half = tiny("llama", tie_word_embeddings=tied).to(torch.bfloat16)
    half.generation_config.eos_token_id = None
    assert found == greedy(half, rows((5, 9)), 3)
    assert next(model.parameters()).dtype == torch.float32


@pytest.mark.parametrize("how", [{}, {"shapes": [(2, 64)]}, {"share_prefixes": True}])
def test_weights_that_changed_later_are_refused(how: dict[str, Any]) -> None:
    source = tiny("llama", "AutoModelForCausalLM")
    model, ids = headswap.as_seq_cls_model(source, num_labels=2).eval(), rows((5, 9))
    executor = Executor(model, backend="eager", **how)
    for _ in range(2):
        torch.testing.assert_close(executor.logits(ids), expected(model, ids), atol=1e-5, rtol=0)
    with torch.no_grad():
        model.backbone.layers[0].mlp.up_proj.weight.mul_(2)
    with pytest.raises(DeviceError, match="Make a new Executor"):
        executor.logits(ids)
    anew = Executor(model, backend="eager", **how)
    torch.testing.assert_close(anew.logits(ids), expected(model, ids), atol=1e-5, rtol=0)


@pytest.mark.skipif(MAJOR < 5, reason="4.57 has no DeepSeek V4")
def test_keys_pressed_together_run_only_where_a_row_is_whole() -> None:
    model = pressing_keys()
    ids, device = rows((150, 40)), replace(SPYRE, block_size=64, chunk=64)
    for given in ({}, {"share_prefixes": True, "device": device}):
        found = Executor(model, backend="eager", **given).logits(ids)  # type: ignore[arg-type]
        torch.testing.assert_close(found, expected(model, ids), atol=1e-5, rtol=0)


def test_the_generation_config_s_end_marks_end_a_text() -> None:
    model = tiny("llama")
    first = Executor(model, backend="eager").generate([[5, 6, 7]], 6, eos_token_id=())[0]
    model.generation_config.eos_token_id = [98, first[2]]
    want = greedy(model, [[5, 6, 7]], 6)
    assert len(want[0]) <= 3
    assert Executor(model, backend="eager").generate([[5, 6, 7]], 6) == want
    one = torch.tensor(first[2])
    assert Executor(model, backend="eager").generate([[5, 6, 7]], 6, one) == want  # type: ignore[arg-type]


@pytest.mark.parametrize("attention", ["auto", "packed", "native", "sdpa"])
@pytest.mark.parametrize("kind", ["bert", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_laid_out_whichever_way_rows_run(
    kind: str, attention: str, dtype: torch.dtype
) -> None:
    if not usable():
        pytest.skip("this torch has no oneDNN")
    model = headswap.as_seq_cls_model(tiny(kind, "AutoModel"), num_labels=2).eval().to(dtype)
    executor = Executor(model, backend="eager", attention=attention)
    found = executor.logits([[5, 6, 7], [8]])
    wanted = torch.cat([alone(model, [row]) for row in ([5, 6, 7], [8])])
    near = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, wanted.float(), atol=near, rtol=0)
    assert int(executor.report()["passes"]["linears"].split()[0]) > 5


@pytest.mark.parametrize("how", [{}, {"shapes": [(2, 64)]}], ids=str)
def test_weights_that_change_past_torchs_counter_are_refused_too(how: dict[str, Any]) -> None:
    model = headswap.as_seq_cls_model(tiny("llama", "AutoModel"), num_labels=2).eval()
    executor = Executor(model, backend="eager", **how)
    ids = torch.tensor([[5, 6, 7]])
    executor.logits(ids)
    model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.sum().backward()
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()
    with pytest.raises(DeviceError, match=r"weights .* changed"):
        executor.logits(ids)
    executor = Executor(model, backend="eager", **how)
    executor.logits(ids)
    next(iter(model.parameters())).data.mul_(2)
    with pytest.raises(DeviceError, match=r"weights .* changed"):
        executor.logits(ids)
    executor = Executor(model, backend="eager", **how)
    weight = model.backbone.layers[0].self_attn.q_proj.weight
    weight.data = torch.randn_like(weight)
    with pytest.raises(DeviceError, match=r"weights .* changed"):
        executor.logits(ids)
    executor = Executor(model, backend="eager", **how)
    model.backbone.layers[0].mlp.act_fn = torch.nn.ReLU()
    with pytest.raises(DeviceError, match=r"weights .* changed"):
        executor.logits(ids)


def test_a_row_that_is_no_number_leaves_nothing_in_the_prefix_cache() -> None:
    model = headswap.as_seq_cls_model(tiny("llama", "AutoModel"), num_labels=2).eval()
    with torch.no_grad():
        model.backbone.embed_tokens.weight[50] = float("nan")
    good = [5, 6] * 22
    executor = Executor(model, backend="eager", share_prefixes=True, block_size=16)
    with pytest.raises(NonFiniteError) as caught:
        executor.logits([[*good[:40], 50, 6], good])
    assert caught.value.rows == (0,)
    torch.testing.assert_close(executor.logits([good]), expected(model, [good]), atol=1e-5, rtol=0)


def test_positions_that_begin_behind_the_pad_id_share_no_prefix() -> None:
    source = tiny("roberta", "AutoModelForCausalLM", is_decoder=True)
    model = headswap.as_seq_cls_model(source, num_labels=2, pooling="last").eval()
    ids = rows((40, 20))
    executor = Executor(model, backend="eager", share_prefixes=True)
    assert not executor.report()["shares_prefixes"]
    torch.testing.assert_close(executor.logits(ids), expected(model, ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("extra", [1, 16, 40])
def test_filler_rows_of_a_step_write_into_the_reserved_block_alone(extra: int) -> None:
    from headswap.spyre.cache import decode
    from headswap.spyre.pool import BlockPool

    pool = BlockPool(6, 16)
    lease = pool.admit(list(range(20)))
    step = decode([lease], [20], 16, rows=1 + extra, blocks=2)
    assert step.slots[1:].max() < 16
    assert bool((step.left[1:] < step.filled[1:]).all())
    assert step.filled[1:].max() <= 16


def test_a_backbone_that_asks_for_attention_by_name_keeps_its_own() -> None:
    from headswap.spyre.learning import _asks_for_a_name

    assert not _asks_for_a_name(tiny("llama", "AutoModel"))
    if MAJOR >= 5:
        sparse = pytest.importorskip("transformers.models.deepseek_v32.modeling_deepseek_v32")
        backbone = sparse.DeepseekV32Model.__new__(sparse.DeepseekV32Model)
        assert _asks_for_a_name(backbone)
