# SPDX-License-Identifier: Apache-2.0
"""What a rule found, and a report of all that was found. Loads no torch."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from headswap.spyre.rules import RULES_VERSION, Severity

Dimension = int | str
"""A size, or the text of a symbolic one."""

_RANK: Mapping[Severity, int] = {"error": 0, "warning": 1}


@dataclass(frozen=True, slots=True)
class Finding:
    """One place where a graph or its inputs break a rule.

    rule      the rule's id, "R5"
    severity  "error": the stack refuses it or computes something else; "warning": slow or doubtful
    message   what was found, with its numbers
    remedy    what to do
    node      the graph's node, or the input's name; of merged findings the first one's
    shape     the tensor's sizes; a symbolic size is text
    dtype     torch's name, "float16"
    source    "file:line: code" of the model's line that made the node
    count     how many equal findings this one stands for
    """

    rule: str
    severity: Severity
    message: str
    remedy: str
    node: str = ""
    shape: tuple[Dimension, ...] | None = None
    dtype: str | None = None
    source: str | None = None
    count: int = 1

    @property
    def _order(self) -> tuple[Any, ...]:
        return (
            _RANK[self.severity],
            int(re.sub(r"\D", "", self.rule) or 0),
            self.source or "",
            self.message,
            str(self.shape),
            self.dtype or "",
            self.remedy,
        )

    def __str__(self) -> str:
        """Three lines: what, where, and what to do."""
        times = f" x{self.count}" if self.count > 1 else ""
        sizes = "" if self.shape is None else f" {list(self.shape)}".replace("'", "")
        what = f"{self.rule:<4}{self.severity:<8}{self.message}{times}"
        where = f"{self.node}{sizes} {self.dtype or ''}".strip()
        source = f" at {self.source}" if self.source else ""
        return f"{what}\n            {where}{source}\n            -> {self.remedy}"


@dataclass(frozen=True, slots=True, init=False)
class RuleReport:
    """Findings in a fixed order: errors first, then by rule and source line.

    Findings that are equal but for their node are one, with a count; so a report does not grow with
    a model's depth, and two reports of the same model are equal.
    """

    findings: tuple[Finding, ...]

    def __init__(self, findings: Iterable[Finding] = ()) -> None:
        object.__setattr__(self, "findings", _merged(findings))

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Findings that stop a run."""
        return tuple(f for f in self.findings if f.severity == "error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Findings that do not."""
        return tuple(f for f in self.findings if f.severity == "warning")

    @property
    def clean(self) -> bool:
        """Whether nothing was found, warnings included."""
        return not self.findings

    @property
    def summary(self) -> str:
        """Such as "2 errors, 1 warning"; merged findings count as often as they were found."""
        counts = Counter[Severity]()
        for finding in self.findings:
            counts[finding.severity] += finding.count
        return ", ".join(
            f"{counts[kind]} {kind}{'' if counts[kind] == 1 else 's'}" for kind in _RANK
        )

    def __add__(self, other: RuleReport) -> RuleReport:
        return RuleReport((*self.findings, *other.findings))

    def __str__(self) -> str:
        return "\n".join([f"Rules {RULES_VERSION}: {self.summary}", *map(str, self.findings)])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` reads them."""
        return {"rules": RULES_VERSION, "findings": [asdict(f) for f in self.findings]}

    def to_json(self) -> str:
        """`to_dict` as text, keys in a fixed order."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RuleReport:
        """A report from `to_dict`'s values."""
        return cls(
            Finding(**{**f, "shape": None if f["shape"] is None else tuple(f["shape"])})
            for f in data["findings"]
        )


def _merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    first: dict[Finding, Finding] = {}
    counts = Counter[Finding]()
    for finding in findings:
        key = replace(finding, node="", count=1)
        first.setdefault(key, finding)
        counts[key] += finding.count
    made = (replace(first[key], count=count) for key, count in counts.items())
    return tuple(sorted(made, key=lambda f: f._order))
