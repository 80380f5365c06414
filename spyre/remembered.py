# SPDX-License-Identifier: Apache-2.0
"""Results of earlier calls, at most so many: bookkeeping."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

from torch import Tensor

from headswap.spyre.errors import DeviceError


class Remembered:
    """What the rows that were asked for last gave, for `most` of them; the one that was not asked
    for longest goes first. A key has to hold all that decides a result: what was asked, the ids,
    their segments. Weights that change are refused before."""

    def __init__(self, most: int) -> None:
        if type(most) is not int or most < 0:
            raise DeviceError(f"remember={most!r} is no number of rows; 0 remembers none.")
        self._most, self._held = most, OrderedDict[Hashable, Tensor]()
        self.answered = 0

    def of(self, keys: Iterable[Hashable]) -> list[Tensor | None]:
        """The result of each key; None where it has to be computed."""
        found = [self._held.get(key) for key in keys]
        self.answered += sum(value is not None for value in found)
        return found

    def keep(self, keys: Sequence[Hashable], values: Sequence[Tensor]) -> None:
        """Remember `values`, and that their keys were asked for."""
        for key, value in list(zip(keys, values, strict=True))[max(0, len(keys) - self._most) :]:
            if key not in self._held:
                self._held[key] = value.clone()  # a row of many, which would all be held
            self._held.move_to_end(key)
        while len(self._held) > self._most:
            self._held.popitem(last=False)

    def described(self) -> dict[str, int]:
        """How many rows are held, of how many, and how many were answered so."""
        return {"rows": len(self._held), "most": self._most, "answered": self.answered}
