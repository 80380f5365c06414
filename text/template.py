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
    if not isinstance(template, str):
        raise ConversionError(f"A template is a string; got a {type(template).__name__}.")
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
    def compile(cls, source: str, tokenizer: Any, *, causal: bool = True) -> Template:
        """Encode the fixed parts of `source`, with the tokenizer's own marks around them exactly
        once: the leading ones, and the closing ones where `end_marks` has some."""
        before, after = parse_template(source)
        fixed = copy.deepcopy(tokenizer)
        prefix = fixed(before, add_special_tokens=False)["input_ids"] if before else []
        suffix = fixed(after, add_special_tokens=False)["input_ids"] if after else []
        start, end = start_marks(fixed), end_marks(fixed, causal)
        if tuple(prefix[: len(start)]) != start:
            prefix = [*start, *prefix]
        if end and tuple(suffix[-len(end) :]) != end:
            suffix = [*suffix, *end]
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


def start_marks(tokenizer: Any) -> tuple[int, ...]:
    """The marks that the tokenizer puts before a text by itself (a start or class mark)."""
    return _own_marks(tokenizer)[0]


def end_marks(tokenizer: Any, causal: bool) -> tuple[int, ...]:
    """The marks that belong behind a template: those that the tokenizer puts behind a text by
    itself, unless the model is `causal`, where the template's own end is what comes last.

    A class mark that stands at the end (XLNet) belongs there in any case: it is what is pooled.
    """
    found = _own_marks(tokenizer)[1]
    return found if not causal or tokenizer.cls_token_id in found else ()


def _own_marks(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the tokenizer puts before and behind a text by itself."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    ids = tokenizer("a")["input_ids"]
    for place in range(len(ids) - len(bare) + 1):
        if ids[place : place + len(bare)] == bare:
            return tuple(ids[:place]), tuple(ids[place + len(bare) :])
    return (), ()
