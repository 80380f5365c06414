# SPDX-License-Identifier: Apache-2.0
"""A template around a query and a document, built id by id.

A template is pieces that are encoded apart. Pieces without a slot are fixed, and special marks in
them are parsed; in what a user gives a special mark stays text. A template of one string is three
pieces: what stands before the first slot, from there to the last slot, and the rest.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from headswap.text.template import SLOT, end_marks, parse_parts, start_marks

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
        cls, source: str | Sequence[str], tokenizer: Any, *, marks: bool = True, causal: bool = True
    ) -> PairTemplate:
        """Encode the fixed pieces of `source`, with the tokenizer's own marks around them exactly
        once, as in `Template.compile`; with `marks` False none is added.

        Raises `ConversionError` for an unknown variable, for a template without a query or a
        document slot or with two of one kind, and for a tokenizer that can't tell where a token
        stands in the text.
        """
        if not getattr(tokenizer, "is_fast", False):
            raise ConversionError(
                f"{type(tokenizer).__name__} does not say where its tokens stand in a text, and a "
                "template for pairs needs that to cut the right ones. Use the fast tokenizer."
            )
        parts = [parse_parts(piece, SLOTS) for piece in pieces_of(source)]
        _check_slots(source, [slot for piece in parts for _, slot in piece if slot])
        if isinstance(source, str):
            parts = _three(parts[0])
        body = copy.deepcopy(tokenizer)
        body.backend_tokenizer.post_processor = None  # some take blanks off a token's place
        _encode(body, "")  # sets the state of splitting marks, once and for all
        strings = (source,) if isinstance(source, str) else tuple(source)
        named = any(slot == INSTRUCTION for piece in parts for _, slot in piece)
        fixed = copy.deepcopy(tokenizer)
        pieces = []
        made = cls(strings, named, (), body)
        for part in parts:
            apart = list(_compiled(part, fixed))
            made._check_joints(part, apart, fixed)
            pieces += apart
        if marks:
            first, last = start_marks(fixed), end_marks(fixed, causal)
            if first and not (pieces and pieces[0][: len(first)] == first):
                pieces.insert(0, first)
            if last and pieces[-1][-len(last) :] != last:
                pieces.append(last)
        return replace(made, _pieces=tuple(pieces))

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

    def _check_joints(self, part: list[Part], apart: list[Piece], fixed: Any) -> None:
        """Refuse special marks between slots that change how the text behind them is read."""
        if len(apart) < 2:
            return
        values = dict.fromkeys(SLOTS, "what is this")
        ids = [each for piece in apart for each in self._piece(piece, values)[0]]
        if ids != fixed(_filled(part, values)[0], add_special_tokens=False)["input_ids"]:
            raise ConversionError(
                f"Template {self.strings!r}: what stands behind its special marks has other ids "
                "apart than together. Give a sequence of strings, cut where they are to be encoded "
                "apart.",
                template=self.strings,
            )

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


def pieces_of(source: str | Sequence[str]) -> Sequence[str]:
    """The strings of a template; `ConversionError` for what is none."""
    if not isinstance(source, Sequence):
        raise ConversionError(
            f"A template is a string, or a sequence of them; got a {type(source).__name__}."
        )
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
    pattern = mark_pattern(special_marks(tokenizer))
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


def takes_pairs(source: str | Sequence[str]) -> bool:
    """Whether a template is for a query and a document, and not for one text."""
    parts = [part for piece in pieces_of(source) for part in parse_parts(piece, (*SLOTS, SLOT))]
    return any(slot in SLOTS for _, slot in parts)


def special_marks(tokenizer: Any) -> set[str]:
    """Every special mark: the named ones, and those that only the list of added tokens has."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return {*map(str, tokenizer.all_special_tokens), *(str(t) for t in added if t.special)}


def mark_pattern(marks: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern of one group that finds any of `marks`, the longest first; None without marks."""
    known = sorted((mark for mark in marks if mark), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, known))})") if known else None


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
