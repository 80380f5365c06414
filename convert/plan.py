# SPDX-License-Identifier: Apache-2.0
"""A conversion on paper: what would be done and why, from config and tensor headers alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from headswap.heads import Divide, HeadSpec
from headswap.heads.spec import Layer
from headswap.registry import Resolution

Action = Literal["used", "renamed", "derived", "dropped", "missing", "unexpected", "mismatched"]


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """What happens to one tensor. `name` is the stored name, or the needed one if not stored."""

    name: str
    action: Action
    shape: tuple[int, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class ConversionPlan:
    """What a conversion would do. `ok` says whether it would go through; `problems` why not."""

    source: str
    architecture: str | None
    resolution: Resolution
    head: HeadSpec
    labels: tuple[str, ...]
    label_source: str
    labels_generated: bool
    problem_type: str | None
    stock: bool
    tensors: tuple[TensorPlan, ...]
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether `load` with the same options would succeed, as far as headers tell."""
        return not self.problems

    def counts(self) -> dict[str, int]:
        """Number of tensors for each action."""
        return dict(Counter(tensor.action for tensor in self.tensors))

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        layers = [{"kind": type(layer).__name__, **asdict(layer)} for layer in self.head.layers]
        plain = {
            "source": self.source,
            "architecture": self.architecture,
            "task": self.resolution.task,
            "result": self.resolution.architecture,
            "resolution": self.resolution.to_dict(),
            "head": {"family": self.head.family, "pooling": self.head.pooling,
                     "compat": self.head.compat, "layers": layers},
            "labels": list(self.labels),
            "label_source": self.label_source,
            "labels_generated": self.labels_generated,
            "problem_type": self.problem_type,
            "stock": self.stock,
            "tensors": [asdict(tensor) for tensor in self.tensors],
            "counts": self.counts(),
            "problems": list(self.problems),
            "notes": list(self.notes),
            "ok": self.ok,
        }  # fmt: skip
        return json.loads(json.dumps(plain))  # type: ignore[no-any-return]

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {action}" for action, count in self.counts().items())
        labels = f"{', '.join(self.labels) or 'none'} (from {self.label_source})"
        lines = [
            f"{self.source}: {self.architecture or 'architecture not stated'} -> "
            f"{self.resolution.architecture} [{self.resolution.task}]",
            f"  served by  {self.resolution.entry.architecture} ({self.resolution.reason})",
            f"  head       {self.head.family}, pools {self.head.pooling}: {describe(self.head)}",
            f"  labels     {labels}",
            f"  tensors    {counts}",
            *(f"  note       {note}" for note in self.notes),
            *(f"  problem    {problem}" for problem in self.problems),
        ]
        return "\n".join(lines)


def describe(head: HeadSpec) -> str:
    """The head's layers in a line, such as `bert.pooler.dense -> tanh -> classifier`."""
    steps = [_step(layer) for layer in head.layers if type(layer).__name__ != "Dropout"]
    return " -> ".join(steps) or "none"


def _step(layer: Layer) -> str:
    if isinstance(layer, Divide):
        return f"/ {layer.by}"
    words = {"Difference": "second - first", "Softcap": "soft cap"}
    return str(getattr(layer, "path", getattr(layer, "name", words.get(type(layer).__name__, ""))))


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did: names of tensors by what became of them, and the parity check."""

    source: str
    target: str
    architecture: str
    used: tuple[str, ...]
    renamed: tuple[str, ...]
    derived: tuple[str, ...]
    dropped: Mapping[str, str]
    labels: tuple[str, ...]
    stock: bool
    parity: float
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    def __str__(self) -> str:
        by = "stock transformers" if self.stock else "headswap"
        lines = [
            f"{self.source} -> {self.target} ({self.architecture}, loads with {by})",
            f"  tensors    {len(self.used)} used, {len(self.renamed)} renamed, "
            f"{len(self.derived)} derived, {len(self.dropped)} dropped",
            f"  labels     {', '.join(self.labels)}",
            f"  parity     largest difference after reloading: {self.parity:.1e}",
            *(f"  note       {note}" for note in self.notes),
        ]
        return "\n".join(lines)
