# SPDX-License-Identifier: Apache-2.0
"""What an executor says of itself, as plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headswap.spyre.compiling import Guarded
from headswap.spyre.prepare import Prepared

Progress = Callable[[int, int], None]


class Told:
    """Tells `progress` how many of the rows given are done, of which row i is run as `index[i]`."""

    def __init__(self, progress: Progress | None, index: Sequence[int]) -> None:
        self._progress, self._total, self._done = progress, len(index), 0
        self._stand_for = Counter(index)

    def done(self, places: Sequence[int]) -> None:
        """After a run of the rows at `places`."""
        if not places:
            return
        self._done += sum(self._stand_for[place] for place in places)
        if self._progress is not None:
            self._progress(self._done, self._total)


@dataclass(slots=True)
class Counts:
    """What an executor did so far."""

    rows: int = 0
    tokens: int = 0
    computed: int = 0
    runs: dict[str, int] = field(default_factory=dict)

    def add(self, computed: int, name: str) -> None:
        """One more run called `name`, over `computed` tokens with their padding."""
        self.computed += computed
        self.runs[name] = self.runs.get(name, 0) + 1

    def done(self, rows: list[list[int]]) -> None:
        """`rows` were run."""
        self.rows += len(rows)
        self.tokens += sum(map(len, rows))

    def described(self) -> dict[str, Any]:
        """Rows and tokens, what was computed for them (less, where rows begin alike), and the share
        of it that was padding."""
        waste = max(0.0, 1 - self.tokens / self.computed) if self.computed else 0.0
        return {"rows": self.rows, "tokens": self.tokens, "computed": self.computed,
                "waste": waste, "runs": dict(self.runs)}  # fmt: skip


def described(made: Prepared) -> dict[str, Any]:
    """How a model was prepared."""
    return {
        "hooked": made.hooked,
        "passes": {report.name: report.said for report in made.reports},
    }


def compiled(compiler: Guarded | None) -> dict[str, Any]:
    """How many graphs there are, and whether more may come."""
    if compiler is None:
        return {"compiles": 0, "frozen": False}
    return {"compiles": compiler.compiles, "frozen": compiler.frozen}
