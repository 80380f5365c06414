# SPDX-License-Identifier: Apache-2.0
"""What users give as texts: looked at before anything is encoded, and refused by its number."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeGuard

from headswap.registry.errors import ConversionError, InputError

Text = str | tuple[str, str] | list[int]
Side = Literal["left", "right"]
Truncation = bool | Side


def side_of(truncation: Truncation, tokenizer: Any) -> Side:
    """The side that is cut: the named one, else the tokenizer's own.

    Raises `ConversionError` for another word than "left" and "right".
    """
    if isinstance(truncation, bool):
        return "left" if getattr(tokenizer, "truncation_side", "right") == "left" else "right"
    if truncation not in ("left", "right"):
        raise ConversionError(
            f"truncation={truncation!r}; it is True (cut on the tokenizer's own side), 'left', "
            "'right', or False (refuse)."
        )
    return truncation


def is_whole(value: Any) -> bool:
    """Whether `value` is a whole number, Python's or numpy's, and no truth value."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def whole_number(name: str, value: Any, least: int) -> int:
    """`value` of the option `name`; `ConversionError` for what is no whole number from `least`."""
    if not is_whole(value) or value < least:
        raise ConversionError(
            f"{name}={value!r}; it must be {least} or more, a whole number.", **{name: value}
        )
    return int(value)


def as_list(texts: Any, what: str = "texts") -> list[Any]:
    """`texts` as a list; one string is a list of one.

    Raises `InputError` for bytes, a mapping, and what cannot be gone through.
    """
    if isinstance(texts, str):
        return [texts]
    wrong = isinstance(texts, bytes | bytearray | memoryview | Mapping)
    if wrong or not isinstance(texts, Iterable):
        raise InputError(
            f"{what} must be a string, or a list of them; got {_named(texts)}.", rows=()
        )
    return list(texts)


def check_text(text: str, row: int, what: str = "Text") -> None:
    """Refuse half of a surrogate pair: no UTF-8 text holds one, and no tokenizer has ids for it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{what} {row} has half of a surrogate pair (U+{ord(text[error.start]):04X}, character "
            f"{error.start}), which is no character. Decode it again with errors='replace'.",
            rows=(row,),
        ) from error


def is_ids(text: object) -> TypeGuard[list[int]]:
    """Whether `text` is token ids: a list of whole numbers."""
    return isinstance(text, list) and bool(text) and all(type(each) is int for each in text)


def columns(texts: Sequence[Any]) -> tuple[list[str], list[str] | None]:
    """First and second texts of pairs; of single texts, the texts and None.

    Raises `InputError` for what is neither, or a mixture, naming the first wrong one.
    """
    if all(isinstance(text, str) for text in texts):
        firsts, seconds = [str(text) for text in texts], None
    else:
        text_first = isinstance(texts[0], str)
        no_text = [i for i, each in enumerate(texts) if not _is_text(each)]
        unlike = [i for i, each in enumerate(texts) if isinstance(each, str) != text_first]
        wrong = tuple(no_text or unlike)
        if wrong:
            raise InputError(
                "Texts must be all strings, or all pairs (first, second) of strings; see text "
                f"{wrong[0]}, {_named(texts[wrong[0]])}.",
                rows=wrong,
            )
        firsts, seconds = [text[0] for text in texts], [text[1] for text in texts]
    for part in (firsts, seconds or ()):
        for row, text in enumerate(part):
            check_text(text, row)
    return firsts, seconds


def _is_text(text: object) -> bool:
    """Whether `text` is a string, or a pair of them."""
    if isinstance(text, str):
        return True
    if not isinstance(text, list | tuple) or len(text) != 2:
        return False
    return all(isinstance(part, str) for part in text)


def _named(value: object) -> str:
    """What `value` is, without repeating what may be a user's secret."""
    if value is None:
        return "None"
    more = " (decode it first)" if isinstance(value, bytes | bytearray) else ""
    return f"a {type(value).__name__}{more}"
