# SPDX-License-Identifier: Apache-2.0
"""Answers for texts and documents, and the names of the label columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from headswap.registry.errors import InputError, LabelError
from headswap.text.given import whole_number


@dataclass(frozen=True, slots=True)
class Answer:
    """What a text was classified as. `scores` keeps the order of the label columns."""

    label: str
    score: float
    scores: dict[str, float]
    logits: list[float]
    tokens: int
    truncated: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document's score and raw score (`logit`), and its `index` among those given."""

    index: int
    score: float
    logit: float
    document: str
    tokens: int
    truncated: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def label_names(config: Any) -> tuple[str, ...]:
    """Label names by column: keys of id2label as numbers, whatever their order in the file.

    Raises `LabelError` for two columns of one name, of whose scores only one could be told, and
    for a `label2id` that puts a name on another column.
    """
    named = {int(key): str(name) for key, name in config.id2label.items()}
    back: Mapping[str, Any] = getattr(config, "label2id", None) or {}
    names = tuple(named[key] for key in sorted(named))
    for key, name in named.items():
        if names.count(name) > 1:
            raise LabelError(f"Several columns are called {name!r} in id2label.", label=name)
        # A name that label2id lacks is no contradiction: id2label alone is often set by hand.
        if int(back.get(name, key)) != key:
            raise LabelError(
                f"Label {name!r} is column {key} in id2label and {back[name]} in label2id.",
                label=name,
            )
    return names


def best(scores: Mapping[str, float], top_k: int | None) -> dict[str, float]:
    """The `top_k` highest of `scores`, in the order they had; of equals, the first."""
    if top_k is None:
        return dict(scores)
    kept = sorted(scores, key=lambda name: -scores[name])[:top_k]
    return {name: score for name, score in scores.items() if name in kept}


def check_top_k(top_k: int | None) -> None:
    """Refuse a `top_k` that would leave no label."""
    if top_k is not None:
        whole_number("top_k", top_k, 1)


def check_top_n(top_n: int | None) -> None:
    """Refuse a `top_n` that would leave no document."""
    if top_n is not None:
        whole_number("top_n", top_n, 1)


def check_columns(shape: Sequence[int], rows: int, labels: Sequence[str]) -> None:
    """Refuse logits that are not `[rows, labels]`: one column would pass for all of them."""
    if tuple(shape) != (rows, len(labels)):
        raise LabelError(
            f"The model gave logits of shape {list(shape)} for {rows} texts, and its config names "
            f"{len(labels)} labels ({', '.join(labels[:5])}); that needs [{rows}, {len(labels)}].",
            labels=len(labels),
        )


def check_finite(found: Tensor, what: str) -> None:
    """Refuse rows of `found` (`[rows]` or `[rows, width]`) that are not finite, naming them."""
    bad = ~found.isfinite()
    wrong = tuple((bad.any(dim=1) if bad.dim() > 1 else bad).nonzero().flatten().tolist())
    if wrong:
        raise InputError(
            f"{what} {wrong[0]} has numbers that are not finite. They come of broken weights or of "
            "a dtype that is too narrow; load the model in float32.",
            rows=wrong,
        )
