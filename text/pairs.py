# SPDX-License-Identifier: Apache-2.0
"""A template around a query and a document, built id by id.

A template is pieces that are encoded apart. Pieces without a slot are fixed, and special marks in
them are parsed; in what a user gives a special mark stays text. A template of one string is three
pieces: what stands before the first slot, from there to the last slot, and the rest.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headswap.registry.errors import ConversionError
from headswap.text.cutting import (
    DOCUMENT,
    QUERY,
    Budgets,
    document_first,
    kept,
    lengths,
    room_for_text,
)
from headswap.text.given import Side
from headswap.text.template import parse_parts, start_mark

INSTRUCTION = "instruction"
SLOTS = (INSTRUCTION, QUERY, DOCUMENT)

Part = tuple[str, str | None]
"""Fixed text, and the slot behind it (None at a piece's end)."""
Piece = tuple[int, ...] | tuple[Part, ...]


@dataclass(frozen=True)
class PairTemplate:
    """A template compiled for a tokenizer. `strings` are its pieces as they were given."""

    strings: tuple[str, ...]
    takes_instruction: bool
    _pieces: tuple[Piece, ...]
    _body: Any

    @classmethod
    def compile(
        cls, source: str | Sequence[str], tokenizer: Any, *, start: bool = True
    ) -> PairTemplate:
        """Encode the fixed pieces of `source`, with the tokenizer's start mark exactly once; with
        `start` False no mark is added.

        Raises `ConversionError` for an unknown variable, for a template without a query or a
        document slot or with two of one kind, and for a tokenizer that can't tell where a token
        stands in the text.
        """
        if not getattr(tokenizer, "is_fast", False):
            raise ConversionError(
                f"{type(tokenizer).__name__} does not say where its tokens stand in a text, and a "
                "template for pairs needs that to cut the right ones. Use the fast tokenizer."
            )
        parts = [parse_parts(piece, SLOTS) for piece in _pieces(source)]
        _check_slots(source, [slot for piece in parts for _, slot in piece if slot])
        if isinstance(source, str):
            parts = _three(parts[0])
        fixed = copy.deepcopy(tokenizer)
        first = start_mark(fixed) if start else None
        pieces = [piece for part in parts for piece in _compiled(part, fixed)]
        if first is not None and not (pieces and pieces[0][:1] == (first,)):
            pieces.insert(0, (first,))
        body = copy.deepcopy(tokenizer)
        _encode(body, "")  # sets the state of splitting marks, once and for all
        strings = (source,) if isinstance(source, str) else tuple(source)
        named = any(slot == INSTRUCTION for piece in parts for _, slot in piece)
        return cls(strings, named, tuple(pieces), body)

    def encode(
        self, values: Mapping[str, str], limit: int | None, budgets: Budgets, side: Side = "right"
    ) -> tuple[list[int], int]:
        """Ids of a pair (`values` by slot), and how many there were before cutting.

        The budgets are kept first; then the document, and after it the query, is cut on `side`
        until `limit` is kept. Raises `InputError` where the fixed parts alone fill the limit.
        """
        ids: list[int] = []
        owners: list[str | None] = []
        for piece in self._pieces:
            more, whose = self._piece(piece, values)
            ids += more
            owners += whose
        counts = lengths(owners, budgets)
        if limit is not None and len(ids) > limit:
            counts = document_first(counts, room_for_text(owners, limit))
        return [ids[i] for i in kept(owners, counts, side)], len(ids)

    def _piece(self, piece: Piece, values: Mapping[str, str]) -> tuple[list[int], list[str | None]]:
        if not piece or isinstance(piece[0], int):
            return [i for i in piece if isinstance(i, int)], [None] * len(piece)
        text, spans = _filled([part for part in piece if not isinstance(part, int)], values)
        found = _encode(self._body, text)
        owners = [_owner(spans, begin, end) for begin, end in found["offset_mapping"]]
        return list(found["input_ids"]), owners


def _encode(tokenizer: Any, text: str) -> Any:
    return tokenizer(
        text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True,
        verbose=False,
    )  # fmt: skip


def _pieces(source: str | Sequence[str]) -> Sequence[str]:
    return [source] if isinstance(source, str) else list(source)


def _check_slots(source: Any, slots: Sequence[str]) -> None:
    for name in SLOTS:
        most = f"{slots.count(name)} slots {{{name}}}"
        if slots.count(name) > 1 or (name != INSTRUCTION and name not in slots):
            raise ConversionError(
                f"Template {source!r} has {most}; it needs one"
                + (" at most." if name == INSTRUCTION else "."),
                template=source,
            )


def _three(parts: list[Part]) -> list[list[Part]]:
    """One string's pieces: before the first slot, the slots, behind the last."""
    before, after = parts[0][0], parts[-1][0] if parts[-1][1] is None else ""
    slots = [part for part in parts if part[1] is not None]
    inner: list[Part] = [("", slots[0][1]), *slots[1:]]
    return [[(before, None)], inner, [(after, None)]]


def _compiled(parts: list[Part], tokenizer: Any) -> Iterator[Piece]:
    """A fixed piece as ids; a piece with slots cut at the special marks of its fixed text."""
    if all(slot is None for _, slot in parts):
        text = "".join(literal for literal, _ in parts)
        if text:
            yield tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        return
    marks = sorted(special_marks(tokenizer), key=len, reverse=True)
    pattern = re.compile(f"({'|'.join(map(re.escape, marks))})") if marks else None
    run: list[Part] = []
    for literal, slot in parts:
        pieces = pattern.split(literal) if pattern else [literal]
        for text, mark in zip(pieces[::2], pieces[1::2], strict=False):
            if text:
                run.append((text, None))
            if run:  # an empty one before a start mark would hide it
                yield tuple(run)
            yield (tokenizer.convert_tokens_to_ids(mark),)
            run = []
        run.append((pieces[-1], slot))
    yield tuple(run)


def special_marks(tokenizer: Any) -> set[str]:
    """Every special mark: the named ones, and those that only the list of added tokens has."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return {*map(str, tokenizer.all_special_tokens), *(str(t) for t in added if t.special)}


def _filled(
    parts: Sequence[Part], values: Mapping[str, str]
) -> tuple[str, list[tuple[int, int, str]]]:
    """The text of a run, and where in it the query and the document stand."""
    text, spans = "", []
    for literal, slot in parts:
        text += literal
        if slot is not None:
            begin = len(text)
            text += values[slot]
            if slot != INSTRUCTION:
                spans.append((begin, len(text), slot))
    return text, spans


def _owner(spans: Sequence[tuple[int, int, str]], begin: int, end: int) -> str | None:
    """Whose a token is. One that reaches into the fixed text counts as fixed."""
    return next((slot for a, b, slot in spans if a <= begin < end <= b), None)
