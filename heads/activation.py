# SPDX-License-Identifier: Apache-2.0
"""From logits to scores: which function, who decided, and the function itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from headswap.registry.errors import ConversionError

ActivationName = Literal["softmax", "sigmoid", "identity"]
Source = Literal["call", "problem_type", "function_to_apply", "sentence_transformers", "default"]

_PROBLEM_TYPES: dict[str, ActivationName] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
# transformers' text-classification pipeline calls the identity "none".
_FUNCTIONS: dict[str, ActivationName] = {
    "none": "identity",
    "sigmoid": "sigmoid",
    "softmax": "softmax",
}
# sentence-transformers stores a class path; it is looked up here and never imported.
_MODULES: dict[str, ActivationName] = {
    "Identity": "identity",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
}


@dataclass(frozen=True, slots=True)
class ActivationChoice:
    """The function that turns logits into scores, and what decided it."""

    name: ActivationName
    source: Source
    reason: str


def choose_activation(config: Any, *, num_labels: int, call: str | None = None) -> ActivationChoice:
    """The activation of a classifier with `num_labels` columns.

    The call decides; then what the checkpoint saved (sentence-transformers' `activation_fn`,
    `problem_type`, `function_to_apply`); then the default, sigmoid for one column and softmax
    for more. Raises `ConversionError` for an unknown value, and for a softmax that the call asks of
    one column (it would always be 1).
    """
    if call is not None:
        name = _look_up("activation", call, {a: a for a in get_args(ActivationName)})
        if name == "softmax" and num_labels == 1:
            raise ConversionError(
                "activation='softmax' over one label is always 1; use 'sigmoid' or 'identity'.",
                activation=call,
            )
        return ActivationChoice(name, "call", f"asked for {call!r}")
    return _saved(config, num_labels) or _default(num_labels)


def _saved(config: Any, num_labels: int) -> ActivationChoice | None:
    found: list[tuple[Source, str, Mapping[str, ActivationName]]] = []
    module = _stored_module(config)
    if module is not None:
        found.append(("sentence_transformers", module, _MODULES))
    fields: tuple[tuple[Source, Mapping[str, ActivationName]], ...] = (
        ("problem_type", _PROBLEM_TYPES),
        ("function_to_apply", _FUNCTIONS),
    )
    for field, table in fields:
        value = getattr(config, field, None)
        if value is not None:
            found.append((field, str(value), table))
    if not found:
        return None
    source, value, known = found[0]
    name = _look_up(source, value, known)
    if name == "softmax" and num_labels == 1:
        name = "sigmoid"  # one column is never soft-maxed
    return ActivationChoice(name, source, f"the checkpoint says {source}={value!r}")


def _stored_module(config: Any) -> str | None:
    """The class name under either of sentence-transformers' spellings, without torch's path."""
    section = getattr(config, "sentence_transformers", None)
    path = section.get("activation_fn") if isinstance(section, Mapping) else None
    path = path or getattr(config, "sbert_ce_default_activation_function", None)
    if path is None:
        return None
    prefix = "torch.nn."  # with or without the file it lies in, as sentence-transformers takes it
    return str(path).rsplit(".", 1)[-1] if str(path).startswith(prefix) else str(path)


def _look_up(what: str, value: str, table: Mapping[str, ActivationName]) -> ActivationName:
    if value not in table:
        raise ConversionError(
            f"Unknown {what} {value!r}; known: {', '.join(table)}.", **{what: value}
        )
    return table[value]


def _default(num_labels: int) -> ActivationChoice:
    if num_labels == 1:
        return ActivationChoice("sigmoid", "default", "one label and no problem_type")
    return ActivationChoice("softmax", "default", "several labels and no problem_type")


def apply_activation(logits: Tensor, choice: ActivationChoice) -> Tensor:
    """Scores `[batch, labels]` of `logits` `[batch, labels]`, computed in fp32."""
    logits = logits.float()
    if choice.name == "softmax":
        return torch.softmax(logits, dim=-1)
    return torch.sigmoid(logits) if choice.name == "sigmoid" else logits
