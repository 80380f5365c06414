# SPDX-License-Identifier: Apache-2.0
"""Which rows each pooling rule takes, on tensors whose values name their place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headswap.heads import check_mask, moved_left, pool, take
from headswap.registry import InputError

# hidden[row, place] = (10 * row + place, -(10 * row + place))
PLACES = torch.tensor([[10.0 * row + place for place in range(5)] for row in range(3)])
HIDDEN = torch.stack([PLACES, -PLACES], dim=-1)
MASKS = {
    "none": [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]],
    "right": [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]],
    "left": [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1], [1, 1, 1, 1, 1]],
    "mixed": [[0, 1, 1, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 1, 1]],
}
WANTED = {
    ("none", "first"): [0, 10, 20],
    ("none", "last"): [4, 14, 24],
    ("none", "mean"): [2, 12, 22],
    ("right", "first"): [0, 10, 20],
    ("right", "last"): [2, 10, 24],
    ("right", "mean"): [1, 10, 22],
    ("left", "first"): [2, 14, 20],
    ("left", "last"): [4, 14, 24],
    ("left", "mean"): [3, 14, 22],
    ("mixed", "first"): [1, 10, 23],
    ("mixed", "last"): [3, 11, 24],
    ("mixed", "mean"): [2, 10.5, 23.5],
}


def real_tokens(pads: str) -> torch.Tensor:
    return torch.tensor(MASKS[pads]) != 0


@pytest.mark.parametrize(("pads", "rule"), list(WANTED))
def test_each_rule_takes_the_rows_that_it_names(pads: str, rule: Any) -> None:
    found = pool(HIDDEN, real_tokens(pads), rule)
    wanted = torch.tensor([float(value) for value in WANTED[pads, rule]])
    torch.testing.assert_close(found, torch.stack([wanted, -wanted], dim=-1))


@pytest.mark.parametrize("pads", list(MASKS))
def test_all_keeps_every_row(pads: str) -> None:
    assert pool(HIDDEN, real_tokens(pads), "all") is HIDDEN


@pytest.mark.parametrize("poison", [1e4, float("inf"), float("nan")])
@pytest.mark.parametrize("rule", ["first", "last", "mean"])
def test_what_stands_on_the_pads_does_not_count(rule: Any, poison: float) -> None:
    real = real_tokens("mixed")
    poisoned = torch.where(real.unsqueeze(-1), HIDDEN, torch.full_like(HIDDEN, poison))
    torch.testing.assert_close(pool(poisoned, real, rule), pool(HIDDEN, real, rule))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_picked_rows_keep_their_dtype_and_the_mean_is_fp32(dtype: torch.dtype) -> None:
    hidden, real = HIDDEN.to(dtype), real_tokens("mixed")
    assert pool(hidden, real, "first").dtype == dtype
    assert pool(hidden, real, "last").dtype == dtype
    assert pool(hidden, real, "mean").dtype == torch.float32


def test_a_wide_fp16_mean_of_small_states_stays_within_one_percent() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = (torch.rand(2, 300, 4096, generator=generator) + 0.5) * 1e-3
    states = exact.half()
    real = torch.ones(2, 300, dtype=torch.bool)
    real[0, :37] = False
    found = pool(states, real, "mean")
    wanted = torch.stack([exact[0, 37:].mean(0), exact[1].mean(0)])
    assert ((found - wanted).abs() / wanted).max() < 0.01


@pytest.mark.parametrize("rule", ["first", "last", "mean"])
def test_strided_states_pool_like_contiguous_ones(rule: Any) -> None:
    states = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1)).half()
    strided = states.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    real = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1], [1] * 6]) != 0
    assert not strided.is_contiguous()
    torch.testing.assert_close(pool(strided, real, rule), pool(states, real, rule))


@given(
    st.lists(st.tuples(st.integers(1, 7), st.integers(0, 5)), min_size=1, max_size=5),
    st.integers(0, 4),
    st.sampled_from(["first", "last", "mean"]),
)
def test_a_row_among_pads_and_neighbours_pools_like_the_row_alone(
    shapes: list[tuple[int, int]], spare: int, rule: Any
) -> None:
    width = max(length + left for length, left in shapes) + spare
    generator = torch.Generator().manual_seed(width)
    hidden = torch.randn(len(shapes), width, 3, generator=generator)
    real = torch.zeros(len(shapes), width, dtype=torch.bool)
    for row, (length, left) in enumerate(shapes):
        real[row, left : left + length] = True
    check_mask(real.long())
    found = pool(hidden, real, rule)
    for row, (length, left) in enumerate(shapes):
        own = hidden[row : row + 1, left : left + length]
        alone = pool(own, torch.ones(1, length, dtype=torch.bool), rule)
        torch.testing.assert_close(found[row : row + 1], alone)


# -- masks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pads", list(MASKS))
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float32])
def test_a_mask_of_any_dtype_without_holes_passes(pads: str, dtype: torch.dtype) -> None:
    check_mask(torch.tensor(MASKS[pads]).to(dtype))


@pytest.mark.parametrize(("mask", "rows"), [
    ([[0, 0, 0]], (0,)),
    ([[1, 1, 0], [0, 0, 0], [0, 1, 1], [0, 0, 0]], (1, 3)),
])  # fmt: skip
def test_rows_without_a_real_token_are_named(mask: list[list[int]], rows: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="no real token") as caught:
        check_mask(torch.tensor(mask))
    assert caught.value.rows == rows
    assert str(list(rows)) in str(caught.value)


@pytest.mark.parametrize(("mask", "rows"), [
    ([[1, 0, 1, 0]], (0,)),
    ([[1, 1, 1, 1], [0, 1, 0, 1], [1, 1, 0, 1], [0, 0, 1, 1]], (1, 2)),
])  # fmt: skip
def test_rows_with_a_hole_are_named(mask: list[list[int]], rows: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="between real tokens") as caught:
        check_mask(torch.tensor(mask))
    assert caught.value.rows == rows
    assert str(list(rows)) in str(caught.value)


@given(st.lists(st.booleans(), min_size=1, max_size=9))
def test_exactly_the_rows_with_one_run_of_ones_pass(mask: list[bool]) -> None:
    text = "".join("1" if real else "0" for real in mask).strip("0")
    row = torch.tensor([mask]).long()
    if text and "0" not in text:
        check_mask(row)
    else:
        with pytest.raises(InputError) as caught:
            check_mask(row)
        assert caught.value.rows == (0,)


@pytest.mark.parametrize("shape", [(3,), (1, 1, 3, 3)])
def test_a_mask_that_is_not_batch_by_length_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="batch, length"):
        check_mask(torch.ones(shape))


# -- positions ------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(0, 6), st.integers(0, 6))
def test_left_pads_are_moved_behind_the_text_and_back(length: int, left: int, right: int) -> None:
    mask = torch.tensor([[0] * left + [1] * length + [0] * right])
    values = torch.arange(mask.shape[1]).unsqueeze(0)
    order = moved_left(mask)
    if left == 0:
        assert order is None
        return
    assert order is not None
    moved = take(values, order)
    assert moved[0, :length].tolist() == list(range(left, left + length))
    assert take(mask, order).tolist() == [[1] * length + [0] * (left + right)]
    assert take(moved, order.argsort(dim=1)).tolist() == values.tolist()


@pytest.mark.parametrize("mask", [[[1, 2, 0]], [[1.0, 0.5, 0.0]], [[0.0, 0.0, -1e9]]])
def test_masks_of_other_values_than_0_and_1_are_refused(mask: list[list[float]]) -> None:
    with pytest.raises(InputError, match="other than 0 and 1"):
        check_mask(torch.tensor(mask))


def test_a_mask_of_another_batch_is_refused() -> None:
    with pytest.raises(InputError, match=r"\[1, 3\]; expected \[2, 3\]"):
        check_mask(torch.ones(1, 3), (2, 3))
