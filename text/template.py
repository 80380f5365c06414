# SPDX-License-Identifier: Apache-2.0
"""A template around a user's text, built id by id.

The fixed parts are encoded apart from the text, with their special marks parsed; in the user's
text a special mark stays text. Joining strings first would merge tokens across the joints.
"""

from __future__ import annotations

import copy
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headswap.registry.errors import ConversionError, InputError
from headswap.text.given import Side

SLOT = "text"


def parse_parts(template: str, known: Sequence[str]) -> list[tuple[str, str | None]]:
    """Fixed texts, each with the slot behind it (None at the end); `{{` and `}}` are braces.

    Raises `ConversionError` for a variable that is not in `known`, or a stray brace.
    """
    parts: list[tuple[str, str | None]] = []
    rest = ""
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConversionError(f"Template {template!r}: {error}.", template=template) from error
    for literal, name, spec, conversion in pieces:
        rest += literal
        if name is None:
            continue
        if name not in known or spec or conversion:
            raise ConversionError(
                f"Template {template!r} has the variable {{{name}}}; known: "
                f"{', '.join(f'{{{each}}}' for each in known)}.",
                template=template,
            )
        parts.append((rest, name))
        rest = ""
    return [*parts, (rest, None)] if rest or not parts else parts


def parse_template(template: str) -> tuple[str, str]:
    """The fixed strings before and after the slot `{text}`; `{{` and `}}` are literal braces.

    Raises `ConversionError` for no slot, two slots, another variable or a stray brace.
    """
    parts = parse_parts(template, (SLOT,))
    slots = sum(slot is not None for _, slot in parts)
    if slots != 1:
        raise ConversionError(
            f"Template {template!r} has {slots} slots {{{SLOT}}}; it needs one.",
            template=template,
        )
    return parts[0][0], "".join(literal for literal, _ in parts[1:])


@dataclass(frozen=True)
class Template:
    """A template compiled for a tokenizer: ids before and after the user's text."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    _body: Any

    @classmethod
    def compile(cls, source: str, tokenizer: Any) -> Template:
        """Encode the fixed parts of `source`, with the tokenizer's start mark exactly once."""
        before, after = parse_template(source)
        fixed = copy.deepcopy(tokenizer)
        prefix = fixed(before, add_special_tokens=False)["input_ids"] if before else []
        suffix = fixed(after, add_special_tokens=False)["input_ids"] if after else []
        start = start_mark(fixed)
        if start is not None and prefix[:1] != [start]:
            prefix = [start, *prefix]
        # A copy of its own: the switch below is a state of the tokenizer, not of a call.
        body = copy.deepcopy(tokenizer)
        body("", add_special_tokens=False, split_special_tokens=True)
        return cls(tuple(prefix), tuple(suffix), body)

    def encode(self, text: str, limit: int | None, side: Side = "right") -> tuple[list[int], int]:
        """Ids of `text` in the template, cut to `limit` ids by shortening the text on `side`, and
        the number of ids before cutting.

        Raises `InputError` where the fixed parts alone are longer than the limit.
        """
        body = self._body(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        fixed = len(self.prefix) + len(self.suffix)
        full = fixed + len(body)
        if limit is not None and full > limit:
            if fixed >= limit:
                raise InputError(
                    f"The template's fixed parts take {fixed} tokens, and the limit is {limit}; "
                    "nothing of a text would be left.",
                    rows=(),
                )
            room = limit - fixed
            body = body[:room] if side == "right" else body[-room:]
        return [*self.prefix, *body, *self.suffix], full


def start_mark(tokenizer: Any) -> int | None:
    """The mark that the tokenizer puts before a text by itself (a start or class mark), or None."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    ids = tokenizer("a")["input_ids"]
    marked = len(ids) > len(bare) and ids[1 : 1 + len(bare)] == bare
    return int(ids[0]) if marked else None
