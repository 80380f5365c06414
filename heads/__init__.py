# SPDX-License-Identifier: Apache-2.0
"""Heads: pooling rules and layers as data, and the one executor that runs them."""

from headswap.heads.activation import ActivationChoice, apply_activation, choose_activation
from headswap.heads.calibration import Calibration, choose_calibration, keep_temperature
from headswap.heads.executor import run_head
from headswap.heads.interface import HeadedModel
from headswap.heads.pooling import (
    check_mask,
    end_marks,
    moved_left,
    pool,
    pooled_index,
    real_by_rule,
    take,
)
from headswap.heads.spec import (
    Activation,
    Dense,
    Difference,
    Divide,
    Dropout,
    Field,
    HeadFamily,
    HeadSpec,
    Norm,
    Pooling,
    Softcap,
    When,
)
from headswap.heads.table import default_family, families, family, native_family, release

__all__ = [
    "Activation",
    "ActivationChoice",
    "Calibration",
    "Dense",
    "Difference",
    "Divide",
    "Dropout",
    "Field",
    "HeadFamily",
    "HeadSpec",
    "HeadedModel",
    "Norm",
    "Pooling",
    "Softcap",
    "When",
    "apply_activation",
    "check_mask",
    "choose_activation",
    "choose_calibration",
    "default_family",
    "end_marks",
    "families",
    "family",
    "keep_temperature",
    "moved_left",
    "native_family",
    "pool",
    "pooled_index",
    "real_by_rule",
    "release",
    "run_head",
    "take",
]
