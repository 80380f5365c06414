# SPDX-License-Identifier: Apache-2.0
"""Warnings that point to the user's line, however deep in headswap they arise."""

from __future__ import annotations

import sys
import warnings


def notify(message: str) -> None:
    """Warn, with the innermost line outside headswap as the place."""
    depth, frame = 1, sys._getframe(0)
    while frame.f_back is not None and _ours(frame.f_globals.get("__name__", "")):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, stacklevel=depth)


def _ours(module: str) -> bool:
    return module == "headswap" or module.startswith("headswap.")
