# SPDX-License-Identifier: Apache-2.0
"""From raw logits to scores: the calibration, then the activation, and who decided each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from headswap.heads import (
    ActivationChoice,
    Calibration,
    apply_activation,
    choose_activation,
    choose_calibration,
)
from headswap.registry.errors import InputError

CalibrationLike = Calibration | Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Scoring:
    """What stands between the logits of a model with `labels` columns and its scores."""

    config: Any
    labels: int
    activation: ActivationChoice
    calibration: Calibration

    @classmethod
    def of(
        cls, config: Any, labels: int, activation: str | None, calibration: CalibrationLike | None
    ) -> Scoring:
        """What is asked for, else what the checkpoint saved, else the defaults."""
        return cls(
            config,
            labels,
            choose_activation(config, num_labels=labels, call=activation),
            choose_calibration(config, calibration),
        )

    def for_call(self, activation: str | None, calibration: CalibrationLike | None) -> Scoring:
        """This, with what one call asks for in its place."""
        chosen, numbers = self.activation, self.calibration
        if activation is not None:
            chosen = choose_activation(self.config, num_labels=self.labels, call=activation)
        if calibration is not None:
            numbers = choose_calibration(self.config, calibration)
        return Scoring(self.config, self.labels, chosen, numbers)

    def scores(self, logits: Tensor) -> Tensor:
        """fp32 scores `[rows, labels]` of raw logits `[rows, labels]`, which stay as they are.

        Raises `InputError` for a score that is no finite number: none is the best of a row with it.
        """
        scores = apply_activation(self.calibration.apply(logits), self.activation)
        finite = scores.isfinite() & logits.isfinite()  # a sigmoid of infinity is 1
        wrong = tuple((~finite).any(dim=-1).nonzero().flatten().tolist())
        if wrong:
            row = wrong[0]
            raise InputError(
                f"Text {row} has the scores {scores[row].tolist()[:5]}, of the logits "
                f"{logits[row].tolist()[:5]}. Logits that are not finite come of broken weights or "
                "a dtype that is too narrow (load in float32); else the calibration is too extreme "
                f"(mean {self.calibration.mean}, sigma {self.calibration.sigma}, temperature "
                f"{self.calibration.temperature}).",
                rows=wrong,
            )
        return scores
