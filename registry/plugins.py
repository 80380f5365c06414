# SPDX-License-Identifier: Apache-2.0
"""Entry points: found on the first miss, in every process, each on its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from headswap.registry.errors import PluginWarning

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def distribution(point: EntryPoint) -> str:
    """The name of the distribution that declares the entry point."""
    return point.dist.name if point.dist is not None else point.value


def load_each(group: str, take: Callable[[Any, str], None]) -> tuple[str, ...]:
    """Load every entry point of `group` and hand its object and distribution to `take`.

    A plugin that fails stops no other. Returns the failures, a line each with the entry point's
    name, its distribution and the cause.
    """
    # Here, since it costs more than the rest of this package and most processes miss no name.
    from importlib.metadata import entry_points

    broken = []
    for point in sorted(entry_points(group=group), key=lambda p: (p.name, p.value)):
        try:
            take(point.load, distribution(point))
        except Exception as error:  # a plugin may raise anything; the others must go on
            broken.append(
                f"plugin {point.name!r} of {distribution(point)} ({point.value}) could not be "
                f"loaded: {type(error).__name__}: {error}"
            )
    return tuple(broken)


def warn_of(broken: Iterable[str]) -> None:
    """Warn about each failure; after all plugins, since a warning may be set to raise."""
    for line in broken:
        warnings.warn(line, PluginWarning, stacklevel=5)
