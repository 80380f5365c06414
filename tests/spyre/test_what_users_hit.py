# SPDX-License-Identifier: Apache-2.0
"""Windows on some layers, softmaxes that leak, low precision with pads, a device without gather."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from spyre_models import converted, expected
from tiny_models import rows
from torch.utils._python_dispatch import TorchDispatchMode

from headswap.spyre import SENDNN, native
from headswap.spyre.executor import Executor

IDS = rows((32, 9, 20))
LEFT: dict[str, Any] = {"shapes": [(4, 64)], "device": SENDNN}
HOW: list[dict[str, Any]] = [{}, {"shapes": [(4, 64)]}, LEFT]

WINDOWS: list[tuple[str, dict[str, Any], bool]] = [
    ("mistral", {"sliding_window": 8}, True),
    ("mistral", {"sliding_window": None}, False),
    ("qwen2", {"sliding_window": 8, "use_sliding_window": False}, False),
    ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, True),
    ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}, False),
    ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, False),
]


@pytest.mark.parametrize(("kind", "config", "windowed"), WINDOWS, ids=str)
def test_a_config_decides_which_layers_have_a_window(
    kind: str, config: dict[str, Any], windowed: bool
) -> None:
    model = converted(kind, num_key_value_heads=2, **config)
    other = [[(IDS[0][0] + 1) % 90 + 5, *IDS[0][1:]]]
    for how in HOW:
        executor = Executor(model, backend="eager", **how)
        found = executor.logits(IDS)
        torch.testing.assert_close(found, expected(model, IDS), atol=1e-5, rtol=0)
        moved = float((executor.logits(other)[0] - found[0]).abs().max())
        assert (moved < 1e-6) is windowed  # two windows of 8 do not reach token 0 from token 31


@pytest.mark.parametrize("kind", ["llama", "bert", "gemma2"])
def test_a_softmax_that_leaks_onto_masked_places_moves_little(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = converted(kind)
    softmax = native._softmax

    def leaking(score: torch.Tensor, sinks: Any) -> torch.Tensor:
        weights = softmax(score, sinks)
        return weights + 2e-5 * (weights == 0)

    for how in HOW[1:]:
        executor = Executor(model, backend="eager", attention="native", **how)
        with monkeypatch.context() as patch:
            patch.setattr(native, "_softmax", leaking)
            found = executor.logits(IDS)
            vars(executor.prepared.backbone.config)["pad_token_id"] = 77
            moved = executor.logits(IDS)
        torch.testing.assert_close(found, expected(model, IDS), atol=5e-3, rtol=0)
        torch.testing.assert_close(found, moved, atol=5e-3, rtol=0)
        assert not torch.equal(found, expected(model, IDS))


def keep(states: list[torch.Tensor], module: Any, given: Any, output: Any) -> None:
    states.append(output[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "bert", "modernbert", "mpnet"])
def test_pads_and_filler_stay_finite_in_every_precision(kind: str, dtype: torch.dtype) -> None:
    model = converted(kind)
    alone = Executor(model, backend="eager", dtype=dtype)
    want = torch.cat([alone.logits([row]) for row in IDS])
    scale = float(want.abs().max())
    near = 1e-5 if dtype == torch.float32 else (4e-2 if dtype == torch.bfloat16 else 5e-3) * scale
    for how in HOW[1:]:
        executor = Executor(model, backend="eager", dtype=dtype, **how)
        states: list[torch.Tensor] = []
        executor.prepared.backbone.register_forward_hook(partial(keep, states))
        torch.testing.assert_close(executor.logits(IDS), want, atol=near, rtol=0)
        assert states
        assert all(bool(each.isfinite().all()) for each in states)  # pads and the filler row too


class NoGather(TorchDispatchMode):
    """Refuses advanced indexing of numbers, which the card's compiler lacks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.index.Tensor, torch.ops.aten.gather.default):
            assert not args[0].is_floating_point(), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["llama", "bert", "roberta", "gemma2"])
def test_pooling_needs_no_advanced_indexing(kind: str) -> None:
    model = converted(kind)
    for how in HOW:
        executor = Executor(model, backend="eager", **how)
        with NoGather():
            found = executor.logits(IDS)
        torch.testing.assert_close(found, expected(model, IDS), atol=1e-5, rtol=0)


@pytest.mark.parametrize("how", HOW, ids=str)
def test_no_order_and_no_company_changes_a_row(how: dict[str, Any]) -> None:
    model, ids = converted("qwen2"), rows((5, 9, 30, 9, 1, 17))
    executor, want = Executor(model, backend="eager", **how), expected(model, ids)
    for size, step in ((1, 1), (2, 3), (4, 17), (6, 71)):
        for order in itertools.islice(itertools.permutations(range(6), size), 0, None, step):
            found = executor.logits([ids[i] for i in order])
            torch.testing.assert_close(found, want[list(order)], atol=1e-5, rtol=0)
