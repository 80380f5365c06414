# SPDX-License-Identifier: Apache-2.0
"""Multinomial logistic regression in fp64: the fit, its penalty, and a temperature. Only tensors.

With states `x` `[n, width]` and columns `y` `[n]`, the fit is the minimum over `V` (and `b`) of

    mean_i cross_entropy(V z_i + b, y_i) + penalty / 2 * sum(V ** 2)

where `z = (x - mean) / deviation`, or `z = x / root mean square` where there is no bias: a shift by
the mean could not be undone without one. The scaling is folded back, so the result works on `x`.
The penalty is scikit-learn's `1 / (C * n)`. See Hastie et al., "The Elements of Statistical
Learning", 4.4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from headswap.registry.errors import ConversionError

EXACT = 1e-8
"""Largest entry of the gradient at the end of a fit; the objective is then right to about 1e-13."""
_ROUGH = 1e-5
"""The same where fits are only compared with each other."""
_FOLDS = 5


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer: `weight` `[labels, width]`, `bias` `[labels]` or None, both fp64."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, states: Tensor) -> Tensor:
        """Logits `[n, labels]` of `states` `[n, width]`."""
        logits = states @ self.weight.T
        return logits if self.bias is None else logits + self.bias


@dataclass(frozen=True, slots=True)
class _Scale:
    """`z = (x - shift) / size`, per column of `x`."""

    shift: Tensor
    size: Tensor

    def apply(self, states: Tensor) -> Tensor:
        return (states - self.shift) / self.size

    def fold(self, weight: Tensor, bias: Tensor | None) -> Linear:
        weight = weight / self.size
        return Linear(weight, None if bias is None else bias - weight @ self.shift)


def _scale(states: Tensor, bias: bool) -> _Scale:
    shift = states.mean(dim=0) if bias else torch.zeros_like(states[0])
    size = (states - shift).square().mean(dim=0).sqrt()
    # A column that never changes but by rounding says nothing; it must not be blown up.
    dead = size <= 1e-9 * states.abs().amax(dim=0)
    return _Scale(shift, torch.where(dead, torch.ones_like(size), size))


def fit_linear(states: Tensor, columns: Tensor, labels: int, penalty: float, bias: bool) -> Linear:
    """The fit on `states` `[n, width]` (fp64) and `columns` `[n]` (int64, 0 .. labels-1).

    Deterministic; `ConversionError` where the minimum is not reached to `EXACT`.
    """
    scale = _scale(states, bias)
    found = _minimum(scale.apply(states), columns, labels, penalty, bias, EXACT)
    return scale.fold(*_parts(found, bias))


def _parts(found: Tensor, bias: bool) -> tuple[Tensor, Tensor | None]:
    return (found[:, :-1], found[:, -1]) if bias else (found, None)


def _minimum(
    scaled: Tensor, columns: Tensor, labels: int, penalty: float, bias: bool, tolerance: float,
    start: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`[labels, width (+ 1)]`, by L-BFGS with a line search; the last column is the bias."""
    if bias:
        scaled = torch.cat([scaled, torch.ones_like(scaled[:, :1])], dim=1)
    if start is None:
        start = scaled.new_zeros(labels, scaled.shape[1])
    found = start.clone().requires_grad_()
    solver = torch.optim.LBFGS(
        [found], max_iter=5000, max_eval=10000, tolerance_grad=tolerance, tolerance_change=0.0,
        history_size=20, line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> Tensor:
        solver.zero_grad()
        weight, _ = _parts(found, bias)
        loss = F.cross_entropy(scaled @ found.T, columns) + penalty / 2 * weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with torch.enable_grad():
        solver.step(closure)  # type: ignore[no-untyped-call]
        closure()
    left = 0.0 if found.grad is None else float(found.grad.abs().max())
    if not left <= 100 * tolerance:
        raise ConversionError(
            f"The fit with penalty {penalty} did not settle: its gradient is still {left:.1e}. Ask "
            "for larger penalties=.",
            penalty=penalty,
        )
    return found.detach()


def choose_penalty(
    states: Tensor, columns: Tensor, labels: int, penalties: Sequence[float], bias: bool
) -> float:
    """The penalty of the lowest log-loss in a cross-validation of up to five folds.

    `columns` must be in random order: the n-th text of a label belongs to fold n modulo folds.
    """
    ordered = sorted(penalties, reverse=True)
    if len(ordered) == 1:
        return ordered[0]
    place = torch.zeros_like(columns)
    for label in range(labels):
        members = (columns == label).nonzero().flatten()
        place[members] = torch.arange(len(members))
    folds = min(_FOLDS, int(columns.bincount(minlength=labels).min()))
    total = torch.zeros(len(ordered), dtype=torch.float64)
    for fold in range(folds):
        out = place % folds == fold
        total += _path(states, columns, out, labels, ordered, bias)
    return ordered[int(total.argmin())]


def _path(
    states: Tensor, columns: Tensor, out: Tensor, labels: int, penalties: Sequence[float],
    bias: bool,
) -> Tensor:  # fmt: skip
    """Summed log-loss on the rows `out`, fitted on the others, for each of falling `penalties`."""
    scale = _scale(states[~out], bias)
    inner, outer = scale.apply(states[~out]), scale.apply(states[out])
    losses: list[Tensor] = []
    found = None
    for penalty in penalties:
        found = _minimum(inner, columns[~out], labels, penalty, bias, _ROUGH, found)
        logits = Linear(*_parts(found, bias))(outer)
        losses.append(F.cross_entropy(logits, columns[out], reduction="sum"))
    return torch.stack(losses)


def best_temperature(logits: Tensor, columns: Tensor) -> float | None:
    """The `T` at which `softmax(logits / T)` has the lowest log-loss; None where no `T` has it.

    The log-loss is convex in `1 / T` (Guo et al. 2017, "On Calibration of Modern Neural Networks"),
    so its slope is halved in on between T = 1000 and T = 0.001. It has no minimum where every
    text is right, since ever smaller `T` are better, and where the logits are worse than none.
    """
    right = logits.gather(1, columns.unsqueeze(1)).squeeze(1)

    def slope(inverse: float) -> float:
        expected = ((inverse * logits).softmax(dim=1) * logits).sum(dim=1)
        return float((expected - right).mean())

    low, high = -math.log(1000), math.log(1000)
    if slope(math.exp(low)) >= 0 or slope(math.exp(high)) <= 0:
        return None
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(math.exp(middle)) < 0 else (low, middle)
    return math.exp(-(low + high) / 2)


def split(columns: Sequence[int], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Indices to fit on and to hold out, each in random order; `share` of every label is held out,
    but at least one text."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(columns), generator=generator).tolist()
    members: dict[int, list[int]] = {}
    for index in order:
        members.setdefault(columns[index], []).append(index)
    held = {i for own in members.values() for i in own[: max(1, round(share * len(own)))]}
    return [i for i in order if i not in held], [i for i in order if i in held]
