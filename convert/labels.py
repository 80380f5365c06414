# SPDX-License-Identifier: Apache-2.0
"""The label space: stored rows, config fields and the request must agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headswap.convert.conversion import label_pairs
from headswap.registry.errors import LabelError


@dataclass(frozen=True, slots=True)
class LabelSpace:
    """How many labels there are, who says so, and whether their names were made up."""

    count: int
    source: str
    generated: bool


def declared_labels(raw: Mapping[str, Any]) -> tuple[int | None, Mapping[str, Any]]:
    """The label count that a stored config declares, and the part of it that does.

    The outer config decides, else the inner text config; both and different is an error.
    """
    parts = [raw, raw.get("text_config") or {}]
    found = [(count, part) for part in parts if (count := _count(part)) is not None]
    if len({count for count, _ in found}) > 1:
        raise LabelError(
            f"config.json declares {found[0][0]} labels and its text_config "
            f"{found[1][0]}; keep one."
        )
    return found[0] if found else (None, {})


def _count(part: Mapping[str, Any]) -> int | None:
    if part.get("id2label"):
        return len(part["id2label"])
    count = part.get("num_labels")
    return None if count is None else int(count)


def check_label_map(part: Mapping[str, Any]) -> None:
    """Refuse an `id2label` and a `label2id` that contradict each other, naming the label."""
    id2label, label2id = part.get("id2label"), part.get("label2id")
    if not id2label or not label2id:
        return
    for index, name in id2label.items():
        if int(label2id.get(name, -1)) != int(index):
            raise LabelError(
                f"Label {name!r} is column {index} in id2label and {label2id.get(name)} in "
                "label2id; mend config.json.",
                label=name,
            )


def label_space(
    raw: Mapping[str, Any],
    tensor: str,
    rows: int | None,
    requested: int | None,
    named: bool,
) -> LabelSpace | None:
    """Who decides the number of labels; None where nobody does.

    `named` says that the request names the labels; `rows` is the first dimension of the stored
    head tensor called `tensor` (None if it is not stored). Raises `LabelError` naming the
    tensor and both counts where two sources differ.
    """
    declared, part = declared_labels(raw)
    label_pairs(part.get("id2label"))
    check_label_map(part)
    stored = bool(part.get("id2label"))
    if rows is None:
        if requested is not None:
            return LabelSpace(requested, "request", not named)
        return None if declared is None else LabelSpace(declared, "config.json", not stored)
    for who, count in (("the request", requested), ("config.json", declared)):
        if count is not None and count != rows:
            raise LabelError(
                f"The stored head {tensor} has {rows} rows, but {who} gives {count} labels.",
                tensor=tensor,
                rows=rows,
                labels=count,
            )
    return LabelSpace(rows, f"rows of {tensor}", not (named or stored))
