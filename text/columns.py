# SPDX-License-Identifier: Apache-2.0
"""From the labels of texts to the columns of a model."""

from __future__ import annotations

import operator
from typing import Any

from headswap.registry.errors import LabelError
from headswap.text.answers import label_names

FEWEST = 4
"""Texts that each label needs: one is held out, and the others make at least two folds."""


def label_columns(labels: list[Any], texts: int, model: Any) -> tuple[list[int], tuple[str, ...]]:
    """The column of each of `labels` (names, or columns), and the names of the model's columns.

    Raises `LabelError` for another number of labels than `texts`, names or columns that are not
    the model's, and fewer than `FEWEST` texts of a label.
    """
    if len(labels) != texts:
        raise LabelError(f"{texts} texts and {len(labels)} labels; each text needs one.")
    names = label_names(model.config)
    if all(isinstance(label, str) for label in labels):
        names = _named(sorted(set(labels)), names, model.conversion.id2label is not None)
        columns = [names.index(label) for label in labels]
    else:
        columns = [_column(label, len(names)) for label in labels]
    found = [columns.count(i) for i in range(len(names))]
    if min(found) < FEWEST:
        said = ", ".join(f"{name!r}: {n}" for name, n in zip(names, found, strict=True))
        raise LabelError(
            f"Each of the model's {len(names)} labels needs {FEWEST} texts or more; found {said}."
        )
    return columns, names


def _named(given: list[str], names: tuple[str, ...], chosen: bool) -> tuple[str, ...]:
    """The model's names if they are the labels', else the labels' where the model's say nothing
    (transformers' LABEL_0, LABEL_1, ...)."""
    if len(given) == 1:
        raise LabelError(f"Every text is labelled {given[0]!r}; a fit needs two labels or more.")
    if len(given) != len(names):
        raise LabelError(
            f"The labels have {len(given)} different names ({', '.join(given[:5])}), and the model "
            f"has {len(names)} columns; convert with num_labels={len(given)}."
        )
    if set(given) == set(names):
        return names
    if chosen or names != tuple(f"LABEL_{i}" for i in range(len(names))):
        raise LabelError(
            f"The labels are {', '.join(given[:5])}, and the model's are {', '.join(names[:5])}; "
            "use the model's names, or convert with id2label=."
        )
    return tuple(given)


def _column(label: Any, count: int) -> int:
    try:
        column = operator.index(label)
    except TypeError:
        column = -1
    if isinstance(label, bool) or not 0 <= column < count:
        raise LabelError(
            f"Label {label!r} is no column of the model, which has 0 to {count - 1}; labels must "
            "be all names, or all columns."
        )
    return column
