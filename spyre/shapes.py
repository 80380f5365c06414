# SPDX-License-Identifier: Apache-2.0
"""The rectangles that a device is compiled for, and which rows run in which of them.

Every compiled graph has fixed sizes, so rows are padded up to a declared `Shape`. `ShapePlan.fit`
chooses the runs with the smallest total cost; nothing is ever cut to make it fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from headswap.spyre.errors import ShapeError

T = TypeVar("T")

LENGTH_STEP = 64
"""Tokens; lengths are multiples (sendnn-inference: warm-up shapes; spyre-inference: buckets)."""

BUDGET = 2_048
"""Tokens of a planned run, where nobody says which shapes are wanted (spyre-inference's limit)."""
LONGEST = 512
"""Tokens of the longest planned row then."""
HIDDEN = 768
"""Hidden size that `cost` assumes where the model is not known."""


class Limits(Protocol):
    """The part of a `DeviceSpec` that shapes must respect."""

    @property
    def max_batch(self) -> int:
        """Rows a run."""

    @property
    def max_context(self) -> int:
        """Tokens a row."""

    @property
    def max_volume(self) -> int:
        """Tokens, batch x padded length."""


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """One compiled rectangle: `batch` rows of `length` tokens."""

    batch: int
    length: int

    @property
    def volume(self) -> int:
        """Tokens of the rectangle, padding included."""
        return self.batch * self.length

    def __str__(self) -> str:
        return f"{self.batch} x {self.length}"


def cost(shape: Shape, hidden: int = HIDDEN) -> int:
    """Relative time of one run, padding included.

    A layer multiplies each token with about 12 hidden^2 weights and with 2 length x hidden keys and
    values; divided by 2 hidden that is 6 hidden + length for each token.
    """
    return shape.volume * (6 * hidden + shape.length)


def round_up(tokens: int, step: int = LENGTH_STEP) -> int:
    """The smallest multiple of `step` that is at least `tokens`."""
    return -(-tokens // step) * step


def ladder_pow2(longest: int) -> tuple[int, ...]:
    """Lengths 64, 128, 256, ... up to `longest` tokens, which is rounded up to 64."""
    return ladder_geometric(longest, ratio=(2, 1))


def ladder_geometric(longest: int, ratio: tuple[int, int] = (8, 5)) -> tuple[int, ...]:
    """Lengths that grow by `ratio` (numerator, denominator), each rounded up to 64.

    The last rung is `longest` tokens rounded up, so that a ladder never passes a context limit.
    8/5 leaves less padding than powers of two, for more compiled graphs (spyre-inference's KV
    ladders: 21 % against 39 % on average).
    """
    numerator, denominator = ratio
    if longest < 1 or numerator <= denominator or denominator < 1:
        raise ShapeError(
            f"A ladder up to {longest} tokens by {numerator}/{denominator} has no rungs; the "
            "length must be positive and the ratio above 1.",
            longest=longest,
            ratio=ratio,
        )
    top = round_up(longest)
    rungs, rung = [], LENGTH_STEP
    while rung < top:
        rungs.append(rung)
        rung = round_up(-(-rung * numerator // denominator))
    return (*rungs, top)


@dataclass(frozen=True, slots=True)
class Run:
    """One execution: the rows (indices into the input) that share a rectangle, in input order."""

    shape: Shape
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which rows run where. `lengths` are the rows' true lengths in tokens, in input order."""

    runs: tuple[Run, ...]
    lengths: tuple[int, ...]

    @property
    def cost(self) -> int:
        """Sum of the runs' costs."""
        return sum(cost(run.shape) for run in self.runs)

    @property
    def waste(self) -> float:
        """Share of the computed tokens that are padding, from 0 to below 1."""
        volume = sum(run.shape.volume for run in self.runs)
        return 1 - sum(self.lengths) / volume if volume else 0.0

    def restore(self, outputs: Sequence[Sequence[T]]) -> list[T]:
        """Results in input order, from one sequence a run; results of filler rows are left out."""
        placed: dict[int, T] = {}
        for run, results in zip(self.runs, outputs, strict=True):
            if len(results) < len(run.rows):
                raise ShapeError(
                    f"A run of {len(run.rows)} rows gave {len(results)} results.",
                    rows=run.rows,
                    value=len(results),
                    limit=len(run.rows),
                )
            placed.update(zip(run.rows, results, strict=False))
        return [placed[row] for row in range(len(self.lengths))]


@dataclass(frozen=True, slots=True, init=False)
class ShapePlan:
    """The shapes that may run, checked against a device; sorted by length, then batch.

    `shapes` takes `Shape`s or `(batch, length)` pairs; `spec` is a `DeviceSpec`.
    """

    shapes: tuple[Shape, ...]
    spec: Limits

    def __init__(self, shapes: Iterable[Shape | tuple[int, int]], spec: Limits) -> None:
        made = {s if isinstance(s, Shape) else Shape(*s) for s in shapes}
        for shape in sorted(made):
            _check(shape, spec)
        if not made:
            raise ShapeError("A shape plan needs one shape at least; got none.", shapes=())
        object.__setattr__(self, "shapes", tuple(sorted(made, key=lambda s: (s.length, s.batch))))
        object.__setattr__(self, "spec", spec)

    @classmethod
    def with_token_budget(cls, lengths: Iterable[int], tokens: int, spec: Limits) -> ShapePlan:
        """One shape a length, each with as many rows as `tokens` and the device's limits allow.

        spyre-inference's encoder rule: a short length gets a large batch, one graph a length.
        """
        return cls((_within(length, tokens, spec) for length in lengths), spec)

    @property
    def longest(self) -> int:
        """Tokens of the longest row that can run."""
        return self.shapes[-1].length

    def fit(self, lengths: Sequence[int]) -> Assignment:
        """Place rows of these true lengths (tokens) in the runs of the smallest total cost.

        Raises `ShapeError` for rows that are empty or longer than every shape.
        """
        self._refuse(lengths)
        order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
        choices = self._cheapest([lengths[row] for row in order])
        runs, start = [], 0
        while start < len(order):
            shape = choices[start]
            runs.append(Run(shape, tuple(sorted(order[start : start + shape.batch]))))
            start += shape.batch
        return Assignment(tuple(runs), tuple(lengths))

    def _cheapest(self, descending: Sequence[int]) -> list[Shape]:
        """For each row, the shape of the run that begins there in the best cover of the rest.

        With rows from long to short, filling each run with the next rows loses nothing: what a run
        costs does not depend on who is in it. So the best cover is a shortest path.
        """
        count = len(descending)
        best: list[tuple[int, int]] = [(0, 0)] * (count + 1)  # cost, runs of rows i, i+1, ...
        choices: list[Shape] = [self.shapes[-1]] * count
        for i in reversed(range(count)):
            options = []
            for shape in self.shapes:
                if shape.length >= descending[i]:
                    rest_cost, rest_runs = best[min(i + shape.batch, count)]
                    options.append((cost(shape) + rest_cost, rest_runs + 1, shape))
            total, runs, choices[i] = min(options)
            best[i] = (total, runs)
        return choices

    def _refuse(self, lengths: Sequence[int]) -> None:
        empty = tuple(row for row, length in enumerate(lengths) if length < 1)
        if empty:
            raise ShapeError(
                f"Row {empty[0]} has {lengths[empty[0]]} tokens; a row needs one at least.",
                rows=empty,
                value=lengths[empty[0]],
                limit=1,
            )
        over = tuple(row for row, length in enumerate(lengths) if length > self.longest)
        if over:
            worst = max(lengths[row] for row in over)
            raise ShapeError(
                f"{len(over)} row(s) are longer than every shape: the longest has {worst} tokens, "
                f"the longest shape {self.longest}. Add a longer shape, or shorten the input.",
                rows=over,
                value=worst,
                limit=self.longest,
            )


def _within(length: int, tokens: int, spec: Limits) -> Shape:
    rows = min(tokens, spec.max_volume) // length if length > 0 else 0
    return Shape(min(max(1, rows), spec.max_batch), length)


def _check(shape: Shape, spec: Limits) -> None:
    """Raise `ShapeError` at the first limit that `shape` breaks."""
    batch, length = shape.batch, shape.length
    if batch < 1:
        _break(shape, f"batch {batch} is below 1", batch, 1)
    if length < 1 or length % LENGTH_STEP:
        _break(
            shape, f"length {length} is no positive multiple of {LENGTH_STEP}", length, LENGTH_STEP
        )
    for what, value, limit in (
        ("batch", batch, spec.max_batch),
        ("length", length, spec.max_context),
        ("volume", shape.volume, spec.max_volume),
    ):
        if value > limit:
            _break(shape, f"{what} {value} is above the device's {limit}", value, limit)


def _break(shape: Shape, what: str, value: int, limit: int) -> None:
    raise ShapeError(f"Shape {shape}: {what}.", shape=shape, value=value, limit=limit)


def planned(
    shapes: Iterable[Shape | tuple[int, int]] | None, spec: Limits, *, compiled: bool
) -> ShapePlan | None:
    """A plan of `shapes`; without them the default where graphs are `compiled`, else none."""
    if shapes is not None:
        return ShapePlan(shapes, spec)
    if not compiled:
        return None
    return ShapePlan.with_token_budget(ladder_pow2(LONGEST), BUDGET, spec)
