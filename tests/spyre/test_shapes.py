# SPDX-License-Identifier: Apache-2.0
"""Shapes, ladders, and the placing of rows: every row once, no limit passed, nothing cheaper."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headswap.registry.errors import HeadswapError
from headswap.spyre.device import SENDNN
from headswap.spyre.errors import ShapeError
from headswap.spyre.shapes import (
    LENGTH_STEP,
    Shape,
    ShapePlan,
    cost,
    ladder_geometric,
    ladder_pow2,
    round_up,
)

shapes = st.builds(
    Shape, batch=st.integers(1, 16), length=st.integers(1, 16).map(lambda n: n * LENGTH_STEP)
)
plans = st.lists(shapes, min_size=1, max_size=6).map(lambda made: ShapePlan(made, SENDNN))


@st.composite
def fitted(draw: st.DrawFn, most: int = 40) -> tuple[ShapePlan, list[int]]:
    plan = draw(plans)
    return plan, draw(st.lists(st.integers(1, plan.longest), max_size=most))


def cheapest(plan: ShapePlan, lengths: list[int]) -> int:
    """Cost of the best cover, found otherwise than by `fit`: any run may stay partly empty."""
    descending = tuple(sorted(lengths, reverse=True))

    @cache
    def rest(start: int) -> int:
        if start >= len(descending):
            return 0
        return min(
            cost(shape) + rest(start + taken)
            for shape in plan.shapes
            if shape.length >= descending[start]
            for taken in range(1, shape.batch + 1)
        )

    return rest(0)


@given(fitted())
def test_every_row_is_placed_exactly_once(case: tuple[ShapePlan, list[int]]) -> None:
    plan, lengths = case
    placed = [row for run in plan.fit(lengths).runs for row in run.rows]
    assert sorted(placed) == list(range(len(lengths)))


@given(fitted())
def test_no_row_is_longer_than_its_shape_and_no_run_is_overfull(
    case: tuple[ShapePlan, list[int]],
) -> None:
    plan, lengths = case
    for run in plan.fit(lengths).runs:
        assert run.shape in plan.shapes
        assert 1 <= len(run.rows) <= run.shape.batch
        assert all(lengths[row] <= run.shape.length for row in run.rows)


@given(fitted())
def test_the_device_limits_hold_in_every_run(case: tuple[ShapePlan, list[int]]) -> None:
    plan, lengths = case
    for run in plan.fit(lengths).runs:
        assert run.shape.batch <= SENDNN.max_batch
        assert run.shape.length <= SENDNN.max_context
        assert run.shape.volume <= SENDNN.max_volume


@given(fitted(most=12))
def test_nothing_is_cheaper(case: tuple[ShapePlan, list[int]]) -> None:
    plan, lengths = case
    assert plan.fit(lengths).cost == cheapest(plan, lengths)


@given(fitted())
def test_results_come_back_in_input_order(case: tuple[ShapePlan, list[int]]) -> None:
    plan, lengths = case
    assignment = plan.fit(lengths)
    filler = [-1] * SENDNN.max_batch
    outputs = [[lengths[row] for row in run.rows] + filler for run in assignment.runs]
    assert assignment.restore(outputs) == lengths


@given(fitted())
def test_waste_is_the_share_of_padding(case: tuple[ShapePlan, list[int]]) -> None:
    plan, lengths = case
    assignment = plan.fit(lengths)
    assert 0 <= assignment.waste < 1
    volume = sum(run.shape.volume for run in assignment.runs)
    assert round(volume * (1 - assignment.waste)) == sum(lengths)


@given(fitted(), st.randoms(use_true_random=False))
def test_the_cost_does_not_depend_on_the_order_of_the_rows(
    case: tuple[ShapePlan, list[int]], random: object
) -> None:
    plan, lengths = case
    mixed = list(lengths)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    assert plan.fit(mixed).cost == plan.fit(lengths).cost


def test_a_mixed_batch_is_split_where_that_is_cheaper() -> None:
    plan = ShapePlan([(8, 64), (1, 512)], SENDNN)
    runs = plan.fit([10, 500, 20, 64]).runs
    assert [(run.shape, run.rows) for run in runs] == [
        (Shape(1, 512), (1,)),
        (Shape(8, 64), (0, 2, 3)),
    ]


def test_equal_cost_takes_fewer_runs() -> None:
    plan = ShapePlan([(1, 64), (2, 64)], SENDNN)
    assert [run.shape for run in plan.fit([5, 6]).runs] == [Shape(2, 64)]


def test_no_rows_need_no_run() -> None:
    assignment = ShapePlan([(1, 64)], SENDNN).fit([])
    assert (assignment.runs, assignment.waste, assignment.restore([])) == ((), 0.0, [])


def test_too_long_input_is_refused_with_both_numbers() -> None:
    with pytest.raises(ShapeError, match=r"the longest has 700 tokens, the longest shape 512") as e:
        ShapePlan([(4, 512)], SENDNN).fit([10, 600, 700])
    assert (e.value.rows, e.value.value, e.value.limit) == ((1, 2), 700, 512)
    assert isinstance(e.value, HeadswapError)
    assert isinstance(e.value, ValueError)


def test_an_empty_row_is_refused() -> None:
    with pytest.raises(ShapeError, match="Row 1 has 0 tokens"):
        ShapePlan([(4, 512)], SENDNN).fit([10, 0])


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0, 64), "batch 0 is below 1"),
        ((1, 100), "length 100 is no positive multiple of 64"),
        ((1, 0), "length 0 is no positive multiple of 64"),
        ((1, -64), "length -64 is no positive multiple of 64"),
        ((65, 64), "batch 65 is above the device's 64"),
        ((1, 65536), "length 65536 is above the device's 32768"),
        ((8, 32768), "volume 262144 is above the device's 131072"),
    ],
)
def test_a_shape_that_the_device_refuses_names_both_numbers(
    shape: tuple[int, int], message: str
) -> None:
    with pytest.raises(ShapeError, match=message):
        ShapePlan([(1, 64), shape], SENDNN)


def test_a_plan_needs_a_shape() -> None:
    with pytest.raises(ShapeError, match="one shape at least"):
        ShapePlan([], SENDNN)


def test_a_plan_is_sorted_and_without_doubles() -> None:
    plan = ShapePlan([(1, 512), (8, 64), Shape(1, 512), (2, 64)], SENDNN)
    assert plan.shapes == (Shape(2, 64), Shape(8, 64), Shape(1, 512))
    assert plan == ShapePlan(plan.shapes, SENDNN)


def test_restore_refuses_a_run_with_too_few_results() -> None:
    assignment = ShapePlan([(4, 64)], SENDNN).fit([1, 2])
    with pytest.raises(ShapeError, match="A run of 2 rows gave 1 results"):
        assignment.restore([[0.5]])


def test_powers_of_two() -> None:
    assert ladder_pow2(512) == (64, 128, 256, 512)
    assert ladder_pow2(600) == (64, 128, 256, 512, 640)
    assert ladder_pow2(1) == (64,)


def test_eight_fifths() -> None:
    assert ladder_geometric(1000) == (64, 128, 256, 448, 768, 1024)


@given(st.integers(1, 40_000), st.sampled_from([(2, 1), (8, 5), (4, 3), (9, 8)]))
def test_a_ladder_rises_in_steps_of_64_to_the_longest(longest: int, ratio: tuple[int, int]) -> None:
    rungs = ladder_geometric(longest, ratio)
    assert list(rungs) == sorted(set(rungs))
    assert all(rung % LENGTH_STEP == 0 for rung in rungs)
    assert rungs[-1] == round_up(longest)


@pytest.mark.parametrize(("longest", "ratio"), [(0, (8, 5)), (100, (1, 1)), (100, (2, 0))])
def test_a_ladder_without_rungs_is_refused(longest: int, ratio: tuple[int, int]) -> None:
    with pytest.raises(ShapeError, match="has no rungs"):
        ladder_geometric(longest, ratio)


@given(st.integers(1, 32_768), st.integers(1, 200_000))
def test_a_token_budget_gives_shapes_that_the_device_takes(longest: int, tokens: int) -> None:
    lengths = ladder_pow2(longest)
    plan = ShapePlan.with_token_budget(lengths, tokens, SENDNN)
    assert tuple(shape.length for shape in plan.shapes) == lengths
    for shape in plan.shapes:
        assert shape.batch == 1 or shape.volume <= tokens


def test_a_token_budget_keeps_a_small_devices_limits() -> None:
    small = replace(SENDNN, max_batch=4, max_volume=512)
    plan = ShapePlan.with_token_budget((64, 256, 512), 2048, small)
    assert plan.shapes == (Shape(4, 64), Shape(2, 256), Shape(1, 512))


def test_cost_grows_faster_than_length() -> None:
    assert cost(Shape(1, 1024)) > 2 * cost(Shape(1, 512))
    assert cost(Shape(2, 512)) == 2 * cost(Shape(1, 512))
