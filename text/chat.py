# SPDX-License-Identifier: Apache-2.0
"""A tokenizer's chat template as the form of a pair: messages of the roles query and document.

sentence-transformers (from 5.4 on) turns a pair into these two messages, with a prompt as a system
message before them. The template is rendered once, with a mark in each slot; what stands around the
marks is fixed, so a pair is built id by id and cut as with any other template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from headswap.registry.errors import ConversionError
from headswap.text.cutting import DOCUMENT, QUERY, Budgets
from headswap.text.families import RerankerFamily
from headswap.text.pairs import INSTRUCTION, PairTemplate

NAME = "the tokenizer's chat template"
_ROLES = {INSTRUCTION: "system", QUERY: "query", DOCUMENT: "document"}
_NASTY = " \nA  'b' {c} <d>&\n\n \u00e9. "
"""A text in which a template that changes contents would change something."""


def names_pairs(tokenizer: Any) -> bool:
    """Whether the tokenizer's chat template names both roles of a pair."""
    template = getattr(tokenizer, "chat_template", None)
    return isinstance(template, str) and all(
        re.search(f"[\"']{role}[\"']", template) for role in (QUERY, DOCUMENT)
    )


def chat_family(
    tokenizer: Any,
    *,
    structured: bool = False,
    options: Mapping[str, Any] | None = None,
    instruction: str = "",
) -> RerankerFamily:
    """The chat template of `tokenizer` as a form of pairs; `instruction` is the default one.

    `structured` contents are lists of parts, as some templates want them; `options` go to
    `apply_chat_template`. Raises `ConversionError` for a template that can't carry a pair, or that
    changes what stands in it.
    """
    form = _Chat(tokenizer, structured, dict(options or {}))
    bare = form.template((QUERY, DOCUMENT))
    try:
        instructed: str | None = form.template((INSTRUCTION, QUERY, DOCUMENT))
    except ConversionError:
        if instruction:
            raise
        instructed = None
    return RerankerFamily(
        name=NAME,
        model_type="",
        labels=(),
        pieces=(instructed,) if instruction and instructed else (bare,),
        instructed=None if instructed is None else (instructed,),
        instruction=instruction,
        source="the checkpoint",
        complete=True,
        strips=form.strips(bare),
    )


class _Chat:
    def __init__(self, tokenizer: Any, structured: bool, options: dict[str, Any]) -> None:
        self._tokenizer, self._structured, self._options = tokenizer, structured, options

    def render(self, values: Mapping[str, str]) -> str:
        messages = [
            {"role": _ROLES[slot], "content": [{"type": "text", "text": text}]
             if self._structured else text}
            for slot, text in values.items()
        ]  # fmt: skip
        try:
            return str(
                self._tokenizer.apply_chat_template(messages, tokenize=False, **self._options)
            )
        except Exception as error:  # the template is the checkpoint's own program
            raise _refused(f"it raises {type(error).__name__}: {error}") from error

    def template(self, slots: tuple[str, ...]) -> str:
        """The rendered messages of `slots`, as a template of one string."""
        text = self.render({slot: _mark(slot) for slot in slots})
        for slot in slots:
            if text.count(_mark(slot)) != 1:
                raise _refused(f"it shows the {_ROLES[slot]} {text.count(_mark(slot))} times")
        text = text.replace("{", "{{").replace("}", "}}")
        for slot in slots:
            text = text.replace(_mark(slot), f"{{{slot}}}")
        self._check_ids(text, slots)
        return text

    def strips(self, template: str) -> bool:
        """Whether the template takes blanks off the ends of contents."""
        shown = self.render({QUERY: _NASTY, DOCUMENT: _NASTY})
        if shown == template.format(query=_NASTY, document=_NASTY):
            return False
        if shown == template.format(query=_NASTY.strip(), document=_NASTY.strip()):
            return True
        raise _refused("it changes the texts that it is given")

    def _check_ids(self, template: str, slots: tuple[str, ...]) -> None:
        """Parts must have the ids that they have in the whole, as the reference encodes it."""
        values = dict.fromkeys(slots, "what is this")
        ids, _ = PairTemplate.compile((template,), self._tokenizer, marks=False).encode(
            values, None, Budgets()
        )
        whole = self._tokenizer(template.format(**values), add_special_tokens=False)["input_ids"]
        if ids != whole:
            raise _refused("its parts have other ids apart than together")


def _mark(slot: str) -> str:
    return f"\ue000{slot}\ue001"  # of the private use area, so no template says it


def _refused(why: str) -> ConversionError:
    return ConversionError(
        f"The tokenizer's chat template can't carry a query and a document: {why}. Give template=, "
        "or a chat template that shows messages of the roles 'query' and 'document' once each."
    )
