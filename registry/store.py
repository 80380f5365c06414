# SPDX-License-Identifier: Apache-2.0
"""Holds a registry's state: the one that everybody sees, and what a plugin is preparing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headswap.registry.changes import merged
from headswap.registry.state import State


class Store:
    """Readers take `state` and need no lock; `change` replaces it as a whole."""

    def __init__(self, state: State) -> None:
        self._shared = state
        self._local = threading.local()
        self.lock = threading.RLock()

    @property
    def state(self) -> State:
        """What this thread sees: what it is preparing, else what everybody sees."""
        staged: State | None = getattr(self._local, "staged", None)
        return self._shared if staged is None else staged

    def change(self, make: Callable[[State], State]) -> None:
        """Replace the state by `make` of it; where that raises, nothing has changed."""
        if getattr(self._local, "staged", None) is not None:
            self._local.staged = make(self._local.staged)
            return
        with self.lock:
            self._shared = make(self._shared)

    @contextmanager
    def staging(self, owner: str) -> Iterator[None]:
        """What this thread registers meanwhile is `owner`'s, and shared at the end or not at all.

        No lock is held, since the code that runs may import modules which other threads import.
        """
        base = self._shared
        self._local.staged = base
        try:
            yield
            staged = self._local.staged
        finally:
            self._local.staged = None
        self.change(lambda state: merged(state, base, staged, owner))
