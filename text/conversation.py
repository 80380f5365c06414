# SPDX-License-Identifier: Apache-2.0
"""A conversation's ids, through the chat template; a special mark in its messages stays text.

Without such a mark the rendered text is encoded as a whole, as transformers does. With one, it is
hidden while the template is rendered, so that the marks of the text are the template's own; what
stands between those is encoded apart, where nothing is read as a mark.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headswap.registry.errors import InputError
from headswap.text.given import check_text
from headswap.text.pairs import mark_pattern, special_marks
from headswap.text.template import start_marks

Message = Mapping[str, Any]


class ChatEncoder:
    """Encodes conversations with a tokenizer that has a chat template, behind its start marks
    exactly once. `tokenizer` is this object's own."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.start = start_marks(tokenizer)
        # Copies of their own: how marks are read is a state of a tokenizer, not of a call.
        self._whole, self._text = copy.deepcopy(tokenizer), copy.deepcopy(tokenizer)
        self._text("", add_special_tokens=False, split_special_tokens=True)
        self._marks = special_marks(tokenizer)

    def ids(
        self, number: int, messages: Any, chat_template: str | None, read: str | None = None
    ) -> list[int]:
        """Ids of conversation `number`; in its messages the mark `read` alone is read as one.

        Raises `InputError` for what is no conversation, for one that the template refuses, and for
        special marks in the messages where the tokenizer can't read them as text.
        """
        check_messages(number, messages)
        hidden: list[str] = []
        given = messages
        if pattern := mark_pattern(self._marks - {read}):
            sign = _unused(messages)
            given = _hide(list(messages), pattern, hidden, sign)
        text = self._rendered(number, given, chat_template)
        check_text(text, number, "Conversation")
        _check_shown(number, given, text)
        if hidden and sign in _shown(text, [""] * len(hidden), sign):
            raise _no_text(number, hidden, "the chat template cuts them")
        ids = self._apart(number, text, hidden, sign) if hidden else self._encode(text)
        width = len(self.start)
        while width and tuple(ids[:width]) == self.start:
            ids = ids[width:]
        return [*self.start, *ids]

    def _rendered(self, number: int, messages: Sequence[Message], template: str | None) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [dict(message) for message in messages], chat_template=template, tokenize=False
                )
            )
        except Exception as error:  # the template is the checkpoint's own program
            raise InputError(
                f"Conversation {number}: the chat template refuses it: {error}", rows=(number,)
            ) from error

    def _encode(self, text: str) -> list[int]:
        return list(self._whole(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _apart(self, number: int, text: str, hidden: Sequence[str], sign: str) -> list[int]:
        """Ids of a rendered `text` whose `hidden` marks are text."""
        plain = ["x"] * len(hidden)
        same = self._pieces(text, plain, sign)[0] == self._encode(_shown(text, plain, sign))
        ids, written = self._pieces(text, hidden, sign)
        unknown = {self.tokenizer.unk_token_id}
        if not same or written & (set(self.tokenizer.all_special_ids) - unknown):
            why = f"{type(self.tokenizer).__name__} can't read them as text"
            raise _no_text(number, hidden, why)
        return ids

    def _pieces(self, text: str, words: Sequence[str], sign: str) -> tuple[list[int], set[int]]:
        """Ids with `words` in the hidden places, and those of them that are no template's mark."""
        pattern = mark_pattern(self._marks)
        ids: list[int] = []
        written: set[int] = set()
        for place, piece in enumerate(pattern.split(text) if pattern else [text]):
            if place % 2:
                ids.append(self.tokenizer.convert_tokens_to_ids(piece))
            elif piece:
                encoded = self._text(
                    _shown(piece, words, sign), add_special_tokens=False,
                    split_special_tokens=True, verbose=False,
                )  # fmt: skip
                ids += encoded["input_ids"]
                written |= set(encoded["input_ids"])
        return ids, written


def _no_text(number: int, hidden: Sequence[str], why: str) -> InputError:
    marks = ", ".join(sorted(set(hidden)))
    return InputError(
        f"Conversation {number} has special marks in its messages ({marks}), and {why}. Take them "
        "out, or put a blank inside each.",
        rows=(number,),
    )


def _check_shown(number: int, messages: Sequence[Message], text: str) -> None:
    """Refuse a list of parts that the template printed as Python does."""
    for message in messages:
        if isinstance(message["content"], list) and str(message["content"]) in text:
            raise InputError(
                f"Conversation {number} has a content that is a list of parts, and the chat "
                "template is for strings: it would print the list. Give the text.",
                rows=(number,),
            )


def _hide(value: Any, pattern: re.Pattern[str], hidden: list[str], sign: str) -> Any:
    """`value` with a sign and a number for each mark in its strings; `hidden` gets the marks."""
    if isinstance(value, str):

        def number(mark: re.Match[str]) -> str:
            hidden.append(mark[0])
            return f"{sign}{len(hidden) - 1}{sign}"

        return pattern.sub(number, value)
    if isinstance(value, Mapping):
        return {name: _hide(each, pattern, hidden, sign) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_hide(each, pattern, hidden, sign) for each in value]
    return value


def _shown(text: str, words: Sequence[str], sign: str) -> str:
    return re.sub(f"{sign}(\\d+){sign}", lambda place: words[int(place[1])], text)


def _unused(messages: Any) -> str:
    """A private character that no message has."""
    said = repr(messages)  # which spells such characters out
    return next(c for c in map(chr, range(0xE000, 0xF8FF)) if repr(c)[1:-1] not in said)


def check_messages(number: int, messages: Any) -> None:
    """Refuse, as conversation `number`, what is no list of messages with texts."""
    good = (
        isinstance(messages, Sequence)
        and not isinstance(messages, str)
        and len(messages) > 0
        and all(isinstance(m, Mapping) and {"role", "content"} <= set(m) for m in messages)
    )
    if not good:
        raise InputError(
            f"Conversation {number} is not a list of messages with a role and a content.",
            rows=(number,),
        )
    for place, message in enumerate(messages):
        # A template would print what is no text as Python does ("None", "b'x'"), and rate that.
        kinds = (str, list, type(None)) if message.get("tool_calls") else (str, list)
        content = message["content"]
        parts = content if isinstance(content, list) else []
        wrong = [type(part).__name__ for part in parts if not isinstance(part, Mapping)]
        if wrong:
            raise InputError(
                f"Message {place} of conversation {number} has a {wrong[0]} among its parts; each "
                "is a mapping, such as {'type': 'text', 'text': ...}.",
                rows=(number,),
            )
        if not isinstance(message["role"], str) or not isinstance(content, kinds):
            raise InputError(
                f"Message {place} of conversation {number} has a role that is a "
                f"{type(message['role']).__name__} and a content that is a "
                f"{type(content).__name__}; a role is a string, and a content is one, "
                "or a list of parts.",
                rows=(number,),
            )
