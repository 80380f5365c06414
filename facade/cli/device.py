# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's graphs against a card's rules, on this machine's CPU."""

from __future__ import annotations

from typing import Any

import torch

import headswap
from headswap.registry.errors import ConversionError
from headswap.spyre import Executor, RuleReport
from headswap.spyre.stack import SPECS

LENGTH = 64
"""Tokens of the one row that is run: the rules do not depend on more."""


def checked(path: str, device: str, load: dict[str, Any]) -> RuleReport:
    """What the graphs of the model at `path`, in half precision, break of the rules of `device`
    ("spyre" or "sendnn")."""
    spec = next((spec for name, spec in SPECS.items() if name == device), None)
    if spec is None:
        raise ConversionError(f"--device {device}: known are {', '.join(sorted(SPECS))}.")
    model = headswap.load(path, **load)
    executor = Executor(model, backend="checked", rules="record", device=spec,
                        shapes=[(1, LENGTH)], dtype=torch.float16).warmup()  # fmt: skip
    return executor.rules or RuleReport()
