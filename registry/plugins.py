# SPDX-License-Identifier: Apache-2.0
"""Entry points: found on the first miss, in every process, each on its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from headswap.registry.errors import PluginWarning


def distribution(point: EntryPoint) -> str:
    """The name of the distribution that declares the entry point."""
    return point.dist.name if point.dist is not None else point.value


def load_each(group: str, take: Callable[[Any, str], None]) -> tuple[str, ...]:
    """Load every entry point of `group` and hand its object and distribution to `take`.

    A plugin that fails is warned about with its name, its distribution and the cause, and the
    others go on. Returns what was warned about, a line each.
    """
    broken = []
    for point in sorted(entry_points(group=group), key=lambda p: (p.name, p.value)):
        try:
            take(point.load, distribution(point))
        except Exception as error:  # a plugin may raise anything; the others must go on
            line = (
                f"plugin {point.name!r} of {distribution(point)} ({point.value}) could not be "
                f"loaded: {type(error).__name__}: {error}"
            )
            warnings.warn(line, PluginWarning, stacklevel=4)
            broken.append(line)
    return tuple(broken)
