# SPDX-License-Identifier: Apache-2.0
"""Results of earlier calls: the same numbers, never more of them than asked, keyed by all that
decides a result."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from spyre_models import converted, expected

import headswap
from headswap.spyre import DeviceError, Executor, NonFiniteError
from headswap.spyre.remembered import Remembered

IDS = [[5, 6, 7, 8, 9, 10, 11], [5, 6], [9, 8, 7, 6], [5, 6]]


def runs(executor: Executor) -> int:
    rows: int = executor.report()["rows"]
    return rows


@pytest.mark.parametrize("kind", ["bert", "llama"])
@pytest.mark.parametrize("more", [{}, {"shapes": [(2, 64)]}])
def test_rows_that_are_known_are_not_run_again(kind: str, more: Any) -> None:
    model = converted(kind)
    executor = Executor(model, backend="eager", remember=10, **more)
    own = expected(model, IDS)
    first = executor.logits(IDS)
    assert torch.allclose(first, own, atol=1e-5)
    assert runs(executor) == 3
    told: list[tuple[int, int]] = []
    again = executor.logits([IDS[2], [8, 8, 8], *IDS], progress=lambda *now: told.append(now))
    assert runs(executor) == 4
    assert torch.equal(again[[2, 3, 4, 5]], first)
    assert torch.equal(again[0], first[2])
    assert told == [(5, 6), (6, 6)]
    assert executor.report()["remembered"] == {"rows": 4, "most": 10, "answered": 3}
    assert torch.equal(executor.logits(IDS), first)
    assert runs(executor) == 4


def test_what_is_given_can_be_written_to() -> None:
    executor = Executor(converted("bert"), backend="eager", remember=10)
    first = executor.logits(IDS)
    kept = first.clone()
    first.zero_()
    second = executor.logits(IDS)
    assert torch.equal(second, kept)
    second.zero_()
    assert torch.equal(executor.logits(IDS), kept)
    weight = torch.ones(3, requires_grad=True)
    (executor.logits(IDS) * weight).sum().backward()  # no inference tensor
    assert weight.grad is not None


def test_logits_vectors_and_segments_are_told_apart() -> None:
    executor = Executor(converted("bert"), backend="eager", remember=100)
    plain = Executor(converted("bert"), backend="eager")
    kinds = [[0] * (len(row) - 1) + [1] for row in IDS]
    for _ in range(2):
        assert torch.equal(executor.logits(IDS), plain.logits(IDS))
        assert torch.equal(executor.embed(IDS), plain.embed(IDS))
        assert torch.equal(executor.logits(IDS, kinds), plain.logits(IDS, kinds))
    assert not torch.equal(executor.logits(IDS, kinds), executor.logits(IDS))


def test_nothing_is_remembered_unless_asked() -> None:
    executor = Executor(converted("bert"), backend="eager")
    executor.logits(IDS)
    executor.logits(IDS)
    assert runs(executor) == 6
    assert executor.report()["remembered"] == {"rows": 0, "most": 0, "answered": 0}


def test_weights_that_change_are_refused_and_broken_rows_not_remembered() -> None:
    model = copy.deepcopy(converted("bert"))
    with torch.no_grad():
        model.backbone.embeddings.word_embeddings.weight[77] = float("inf")
    executor = Executor(model, backend="eager", remember=10)
    for _ in range(2):
        with pytest.raises(NonFiniteError):
            executor.logits([[5, 77], [5, 6]])
    assert executor.report()["remembered"]["rows"] == 0
    executor.logits(IDS)
    with torch.no_grad():
        model.backbone.embeddings.word_embeddings.weight.mul_(2)
    with pytest.raises(DeviceError, match="changed"):
        executor.logits(IDS)


def test_an_embedding_model_remembers_vectors() -> None:
    model = headswap.as_embedding_model(converted("bert").backbone)
    executor = Executor(model, backend="eager", remember=2)
    first = executor.embed(IDS)
    assert torch.equal(executor.embed(IDS), first)
    assert executor.report()["remembered"]["rows"] == 2


@pytest.mark.parametrize("most", [-1, 1.5, True, None, "10"])
def test_a_number_that_is_none_is_refused(most: Any) -> None:
    with pytest.raises(DeviceError, match="remember"):
        Executor(converted("bert"), backend="eager", remember=most)


@given(some.integers(0, 6), some.lists(some.lists(some.integers(0, 9), max_size=5), max_size=12))
def test_it_stays_bounded_and_holds_what_was_asked_for_last(
    most: int, calls: list[list[int]]
) -> None:
    known, order = Remembered(most), []
    for call in calls:
        keys = list(dict.fromkeys(call))
        values = [torch.tensor([float(key)]) for key in keys]
        for key, value in zip(keys, known.of(keys), strict=True):
            assert (value is not None) == (key in order[-most:] if most else False)
            assert value is None or float(value) == key
        known.keep(keys, values)
        order = [key for key in order if key not in keys] + keys
        assert known.described()["rows"] == min(most, len(order))
