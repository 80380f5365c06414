# SPDX-License-Identifier: Apache-2.0
"""What begins beyond a few tokens is found by a longer row, and what was learned is taken back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from spyre_models import FAMILIES, MAJOR, converted, expected, pressing_keys
from tiny_models import rows, tiny

import headswap
from headswap.spyre import DeviceError, longer
from headswap.spyre.executor import Executor
from headswap.spyre.visibility import Visibility

IDS = rows((150, 40, 120))


def looks_beyond(kind: str, tokens: int) -> Any:
    """A model whose first layer adds the mean of all states, pads too, to rows of more `tokens`."""
    auto = "AutoModel" if kind in ("bert", "mpnet") else "AutoModelForCausalLM"
    model = headswap.as_seq_cls_model(
        tiny(kind, auto, max_position_embeddings=200), num_labels=3
    ).eval()
    layers: Any = longer.outer_layers(model.backbone)
    attention: Any = next(m for n, m in layers[0].named_modules() if n.endswith("attention")
                          or n == "self_attn")  # fmt: skip

    def more(module: Any, given: Any, found: Any) -> Any:
        states = found[0]
        if states.shape[1] <= tokens:
            return found
        return states + states.mean(dim=1, keepdim=True), *found[1:]

    attention.register_forward_hook(more)
    return model


@pytest.mark.parametrize("kind", ["llama", "bert", "mpnet"])
def test_layers_that_mix_tokens_otherwise_beyond_a_length(kind: str) -> None:
    model = looks_beyond(kind, 100)
    want = expected(model, IDS)
    executor = Executor(model, backend="eager")
    torch.testing.assert_close(executor.logits(IDS), want, atol=1e-5, rtol=0)
    assert not executor.report()["hooked"]
    with pytest.raises(DeviceError, match="gives other numbers for a text with pads"):
        Executor(model, backend="eager", shapes=[(3, 192)])
    short = looks_beyond(kind, 160)  # beyond the row that looks
    assert Executor(short, backend="eager", shapes=[(3, 64)]).logits(IDS[1:2]).shape == (1, 3)


def test_a_window_that_short_rows_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    model = converted("mistral", sliding_window=40)
    want = expected(model, IDS)
    assert Executor(model, backend="eager").report()["hooked"]
    monkeypatch.setattr("headswap.spyre.hook.learned", lambda *_: Visibility(causal=True))
    executor = Executor(model, backend="eager")
    assert not executor.report()["hooked"]
    torch.testing.assert_close(executor.logits(IDS), want, atol=1e-5, rtol=0)


def test_attention_of_ours_that_differs_beyond_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    model = converted("qwen2")
    want = expected(model, IDS)
    from headswap.spyre.native import Native

    padded = Native.padded

    def wrong(self: Any, query: Any, *given: Any) -> Any:
        return padded(self, query, *given) * (2 if query.shape[2] > 100 else 1)

    monkeypatch.setattr(Native, "padded", wrong)
    executor = Executor(model, backend="eager")
    passes = executor.report()["passes"]
    assert passes["attention"] == "the backbone's own, as a longer row showed"
    torch.testing.assert_close(executor.logits(IDS), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_row_is_bounded_and_sees_every_kind_of_layer(kind: str) -> None:
    executor = Executor(converted(kind), backend="eager")
    two = ("gemma2", "gemma3_text", "gpt_oss", "modernbert")
    count = 2 if kind in two else 1
    assert executor.report()["passes"]["longer row"] == f"150 tokens through {count} of 2 layers"
    small = converted(kind, max_position_embeddings=40, **({"n_positions": 40} if kind == "gpt2"
                                                            else {}))  # fmt: skip
    table = Executor(small, backend="eager").prepared.lengths.table
    said = Executor(small, backend="eager").report()["passes"]["longer row"]
    assert said.split()[0] == str(150 if table is None else table)


@pytest.mark.skipif(MAJOR < 5, reason="4.57 has no DeepSeek V4")
def test_keys_pressed_together_are_seen() -> None:
    model = pressing_keys()
    assert not Executor(model, backend="eager").report()["hooked"]
