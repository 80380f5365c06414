# SPDX-License-Identifier: Apache-2.0
"""Entry points: found on the first miss, in every process, each on its own."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headswap.registry.errors import PluginWarning

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Take = Callable[[Callable[[], Any], str], None]


class Plugins:
    """The entry points of `group` (None: there are none), and which have been taken."""

    def __init__(self, group: str | None) -> None:
        self._group = group
        self._all_done = group is None
        self._done: set[str] = set()
        self._broken: dict[str, str] = {}
        self._local = threading.local()

    @property
    def broken(self) -> tuple[str, ...]:
        """A line for each plugin that failed: its name, distribution and cause."""
        return tuple(self._broken.values())

    def read(self, take: Take) -> None:
        """Hand each entry point that was not taken yet to `take`, as (load, distribution).

        A plugin that fails is warned about and stops no other. A thread that is reading already
        (a plugin resolves a name) does not start over, and no lock is held meanwhile: a module that
        another thread is importing would wait for us as we wait for it.
        """
        if self._all_done or getattr(self._local, "reading", False):
            return
        self._local.reading = True
        try:
            news = self._read_each(take)
        finally:
            self._local.reading = False
        for line in news:  # after all plugins, since a warning may be set to raise
            warnings.warn(line, PluginWarning, stacklevel=6)

    def _read_each(self, take: Take) -> list[str]:
        # Here, since it costs more than the rest of this package and most processes miss no name.
        from importlib.metadata import entry_points

        news, waiting = [], False
        for point in sorted(entry_points(group=str(self._group)), key=lambda p: (p.name, p.value)):
            key = f"{point.name}={point.value}"
            if key in self._done:
                continue
            try:
                take(point.load, distribution(point))
            except (Exception, SystemExit) as error:  # it may raise anything; the others go on
                if half_imported(point):
                    waiting = True  # this thread is importing it; the next miss tries again
                    continue
                if key not in self._done:
                    self._broken[key] = failure(point, error)
                    news.append(self._broken[key])
            self._done.add(key)
        self._all_done = not waiting
        return news


def distribution(point: EntryPoint) -> str:
    """The name of the distribution that declares the entry point."""
    return point.dist.name if point.dist is not None else point.value


def half_imported(point: EntryPoint) -> bool:
    """Whether the entry point's module is being imported just now."""
    try:
        name = point.module
    except AttributeError:  # its value is no reference at all
        return False
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def failure(point: EntryPoint, error: BaseException) -> str:
    """What is said of a plugin that failed."""
    return (
        f"plugin {point.name!r} of {distribution(point)} ({point.value}) could not be loaded: "
        f"{type(error).__name__}: {error}"
    )
