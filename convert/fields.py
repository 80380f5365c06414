# SPDX-License-Identifier: Apache-2.0
"""Refuses a config.json whose fields have a form that nothing below could make sense of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headswap.registry.errors import CheckpointError


def check_fields(raw: Mapping[str, Any], file: Path) -> None:
    """`CheckpointError` naming `file`, the field and its value, for a field of the wrong form."""
    for prefix, part in (("", raw), ("text_config.", raw.get("text_config") or {})):
        if not isinstance(part, Mapping):
            _refuse(file, "text_config", part, "an object")
        for name, (fits, form) in _FORMS.items():
            if part.get(name) is not None and not fits(part[name]):
                _refuse(file, prefix + name, part[name], form)


def _refuse(file: Path, name: str, value: Any, form: str) -> None:
    text = repr(value)
    shown = text if len(text) < 80 else f"{text[:77]}..."
    raise CheckpointError(
        f"{file}: {name} is {shown}; it must be {form}.", path=str(file), field=name
    )


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) and name for name in value)


def _count(value: Any) -> bool:
    return type(value) is int and value > 0


def _numbered(value: Any) -> bool:
    return isinstance(value, Mapping) and all(str(key).isdecimal() for key in value)


def _numbers(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        type(number) is int or (isinstance(number, str) and number.isdecimal())
        for number in value.values()
    )


def _id(value: Any) -> bool:
    return type(value) is int and -(2**31) <= value < 2**31


def _code(value: Any) -> bool:
    """Key -> `module.Class`; a tokenizer's is a pair, either of which may be null."""
    return isinstance(value, Mapping) and all(
        isinstance(each, str | None)
        for names in value.values()
        for each in (names if isinstance(names, list) else [names])
    )


def _mark(value: Any) -> bool:
    """What headswap writes: words, numbers, flags, and names of tensors."""
    if not isinstance(value, Mapping):
        return False
    words = ("task", "head", "pooling", "template")
    names = value.get("untrained_head")
    if isinstance(names, list):
        value = {**value, "untrained_head": all(isinstance(name, str) for name in names) or names}
    return all(
        isinstance(each, str) if name in words else isinstance(each, str | int | float | None)
        for name, each in value.items()
    ) and isinstance(value.get("softcap") or 0.0, int | float)


_FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model_type": (lambda value: isinstance(value, str), "a word"),
    "architectures": (_names, "a list of class names"),
    "id2label": (_numbered, "an object from column numbers to names"),
    "label2id": (_numbers, "an object from names to column numbers"),
    "num_labels": (_count, "a whole number from 1 up"),
    "pad_token_id": (_id, "a token id"),
    "auto_map": (_code, "an object from class kinds to module.Class"),
    "quantization_config": (lambda value: isinstance(value, Mapping), "an object"),
    "headswap": (_mark, "what headswap wrote: an object of words, numbers and flags"),
}
