# SPDX-License-Identifier: Apache-2.0
"""From texts to ids, by the tokenizer's own rules, and from ids to padded tensors."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headswap.convert.weights import read_json
from headswap.registry.errors import ConversionError, InputError
from headswap.text.cutting import (
    DOCUMENT,
    QUERY,
    Budgets,
    kept,
    lengths,
    longest_first,
    room_for_text,
)
from headswap.text.given import Text, Truncation, check_text, columns, is_ids, side_of
from headswap.text.lengths import Limit
from headswap.text.notices import notify
from headswap.text.pairs import PairTemplate
from headswap.text.template import Template


@dataclass(frozen=True, slots=True)
class Encoded:
    """Ids of one text, its segments (None where the model has none), and its uncut length."""

    ids: list[int]
    types: list[int] | None
    full: int

    @property
    def truncated(self) -> bool:
        """Whether the text was cut."""
        return self.full > len(self.ids)


class Encoder:
    """Encodes texts for one model. Thread-safe: a fast tokenizer keeps cutting as a state, so each
    way of calling has a copy of its own that is never called otherwise. Its first call sets that
    state, and setting it while another thread encodes is an error, so it is made here."""

    def __init__(
        self,
        tokenizer: Any,
        limit: Limit,
        *,
        template: str | PairTemplate | None = None,
        truncation: Truncation = True,
        budgets: Budgets | None = None,
        hint: str = "",
        causal: bool = True,
    ) -> None:
        self.limit, self._hint = limit, hint
        self._budgets = budgets or Budgets()
        self.side = side_of(truncation, tokenizer)
        self.truncation = truncation is not False
        self._full = copy.deepcopy(tokenizer)
        self._cut = copy.deepcopy(tokenizer)
        self._cut.truncation_side = self.side
        _check_end_mark(self._full, _call(self._full, ["a"], None)[0].ids)
        marks = self._full.num_special_tokens_to_add(pair=False)
        if self.truncation and limit.value is not None and limit.value > marks:
            self._shortened(["a"], None)
        self._segments = "token_type_ids" in tokenizer.model_input_names
        self.template = (
            template
            if template is None or isinstance(template, PairTemplate)
            else Template.compile(template, tokenizer, causal=causal)
        )
        self._pairs: bool | None = None

    def encode(self, texts: Sequence[Text], instruction: str = "") -> list[Encoded]:
        """Ids of each text, with the marks that the tokenizer or the template puts around it; a
        list of ids is taken as it is.

        `instruction` fills that slot of a template for pairs. Raises `InputError` for a text of no
        tokens, for one longer than the limit where cutting is off, and for too many ids; warns once
        with the number of texts that were cut.
        """
        truncation = self.truncation
        if texts and all(is_ids(text) for text in texts):
            # Never cut: whoever made them knows best what in them may go.
            found, truncation = [self._as_they_are(text) for text in texts if is_ids(text)], False
        elif self.template is not None:
            firsts, seconds = columns(texts)
            if not isinstance(instruction, str):
                raise InputError(
                    f"The instruction must be a string; got a {type(instruction).__name__}.",
                    rows=(),
                )
            check_text(instruction, 0, "Instruction")
            given = firsts if seconds is None else list(zip(firsts, seconds, strict=True))
            found = [self._templated(text, instruction) for text in given]
        else:
            found = self._plain(texts)
        self._check(found, truncation)
        return found

    def _as_they_are(self, ids: list[int]) -> Encoded:
        return Encoded(list(ids), [0] * len(ids) if self._segments else None, len(ids))

    def _templated(self, text: str | tuple[str, str], instruction: str) -> Encoded:
        limit = self.limit.value if self.truncation else None
        if isinstance(self.template, PairTemplate):
            if isinstance(text, str):
                raise ConversionError("A template with {query} and {document} takes pairs.")
            values = {"instruction": instruction, "query": text[0], "document": text[1]}
            ids, full = self.template.encode(values, limit, self._budgets, self.side)
        elif isinstance(text, str) and self.template is not None:
            ids, full = self.template.encode(text, limit, self.side)
        else:
            raise ConversionError(
                "A template with {text} takes one text; one with {query} and {document} takes "
                "pairs (Reranker)."
            )
        return Encoded(ids, [0] * len(ids) if self._segments else None, full)

    def _plain(self, texts: Sequence[Text]) -> list[Encoded]:
        if not texts:
            return []
        firsts, seconds = columns(texts)
        if seconds is not None:
            self._require_pairs()
            if self._budgets.any:
                return self._budgeted(firsts, seconds)
        found = _call(self._full, firsts, seconds)
        limit = self.limit.value
        long = [i for i, each in enumerate(found) if limit is not None and each.full > limit]
        if long and self.truncation:
            self._require_room(seconds is not None)
            again = self._shortened(
                [firsts[i] for i in long],
                None if seconds is None else [seconds[i] for i in long],
            )
            for i, each in zip(long, again, strict=True):
                found[i] = Encoded(each.ids, each.types, found[i].full)
        return found

    def _budgeted(self, firsts: list[str], seconds: list[str]) -> list[Encoded]:
        """Pairs whose texts are cut each to its own budget, and then longest first."""
        if not self._full.is_fast:
            raise ConversionError("Budgets for query and document need a fast tokenizer.")
        batch = self._full(firsts, seconds, padding=False, verbose=False)
        types = batch.get("token_type_ids")
        limit = self.limit.value if self.truncation else None
        found = []
        for row, ids in enumerate(batch["input_ids"]):
            owners = [None if i is None else (QUERY, DOCUMENT)[i] for i in batch.sequence_ids(row)]
            counts = lengths(owners, self._budgets)
            if limit is not None:
                counts = longest_first(counts, room_for_text(owners, limit))
            places = kept(owners, counts, self.side)
            segments = None if types is None else [types[row][i] for i in places]
            found.append(Encoded([ids[i] for i in places], segments, len(ids)))
        return found

    def _shortened(self, firsts: list[str], seconds: list[str] | None) -> list[Encoded]:
        """What the tokenizer itself makes of texts under the limit."""
        limit = self.limit.value
        return _call(self._cut, firsts, seconds, truncation="longest_first", max_length=limit)

    def _require_room(self, pair: bool) -> None:
        """Refuse a limit that the marks around a text fill by themselves."""
        marks = self._full.num_special_tokens_to_add(pair=pair)
        if self.limit.value is not None and self.limit.value <= marks:
            raise InputError(
                f"The tokenizer's own marks take {marks} tokens, and the limit is "
                f"{self.limit.value}; nothing of a text would be left.",
                rows=(),
            )

    def _require_pairs(self) -> None:
        """Refuse pairs for a tokenizer that would only glue the two texts together."""
        if self._pairs is None:
            self._pairs = has_pair_scheme(self._full)
        if not self._pairs:
            raise ConversionError(
                f"{type(self._full).__name__} puts no separator between two texts, so a pair would "
                "be read as one text. Give a template, or join the texts yourself." + self._hint
            )

    def _check(self, found: Sequence[Encoded], truncation: bool) -> None:
        limit = self.limit.value
        empty = tuple(i for i, each in enumerate(found) if not each.ids)
        if empty:
            raise InputError(f"Texts {list(empty)} have no tokens at all.", rows=empty)
        over = [i for i, each in enumerate(found) if limit is not None and len(each.ids) > limit]
        if over and not truncation:
            raise InputError(
                f"Text {over[0]} has {len(found[over[0]].ids)} tokens, and the limit is {limit} "
                f"(from {self.limit.source}). Shorten it"
                + ("; token ids are not cut." if self.truncation else ", or allow truncation."),
                rows=tuple(over),
            )
        cut = sum(each.truncated for each in found)
        if cut:
            own = " or to the budgets of query and document" if self._budgets.any else ""
            notify(
                f"{cut} of {len(found)} texts were cut to {limit} tokens (limit from "
                f"{self.limit.source}){own}."
            )


def _call(
    tokenizer: Any, firsts: list[str], seconds: list[str] | None, **options: Any
) -> list[Encoded]:
    found = tokenizer(firsts, seconds, padding=False, verbose=False, **options)
    types = found.get("token_type_ids") or [None] * len(firsts)
    return [Encoded(i, t, len(i)) for i, t in zip(found["input_ids"], types, strict=True)]


def _check_end_mark(tokenizer: Any, ids: list[int]) -> None:
    """Warn of an end mark that one of the tokenizer's files asks for and another leaves out."""
    if (
        _asks_for_end_mark(tokenizer)
        and tokenizer.eos_token_id is not None
        and ids[-1:] != [tokenizer.eos_token_id]
    ):
        notify(
            "tokenizer_config.json says add_eos_token=true, but the post-processor in "
            f"tokenizer.json puts no {tokenizer.eos_token!r} behind a text, so none is there. If "
            "the model was trained with it, mend the post-processor."
        )


def _asks_for_end_mark(tokenizer: Any) -> bool:
    """What tokenizer_config.json says; newer transformers keep it off the loaded tokenizer."""
    file = Path(str(tokenizer.name_or_path), "tokenizer_config.json")
    said = tokenizer.init_kwargs.get("add_eos_token")
    if said is None:
        said = read_json(file, {}).get("add_eos_token")
    return bool(said)


def has_pair_scheme(tokenizer: Any) -> bool:
    """Whether the tokenizer puts an end or separator mark between the texts of a pair."""
    single = tokenizer("a", add_special_tokens=False)["input_ids"]
    pair = tokenizer("a", "a")["input_ids"]
    marks = {tokenizer.sep_token_id, tokenizer.eos_token_id} - {None, tokenizer.bos_token_id}
    inner = pair[:-1] if pair and pair[-1] in marks else pair
    return bool(single) and any(mark in inner for mark in marks)


def collate(rows: Sequence[Encoded], pad_id: int, side: str = "right") -> dict[str, Tensor]:
    """Padded int64 tensors `[batch, length]`: input_ids, attention_mask and, where the rows have
    segments, token_type_ids.

    The mask decides what is real, so `pad_id` may be any id. `side` is "right" or "left".
    """
    width = max(len(row.ids) for row in rows)

    def padded(values: Sequence[int], fill: int) -> list[int]:
        rest = [fill] * (width - len(values))
        return [*rest, *values] if side == "left" else [*values, *rest]

    batch = {
        "input_ids": torch.tensor([padded(row.ids, pad_id) for row in rows]),
        "attention_mask": torch.tensor([padded([1] * len(row.ids), 0) for row in rows]),
    }
    if all(row.types is not None for row in rows):
        batch["token_type_ids"] = torch.tensor([padded(row.types or (), 0) for row in rows])
    return batch
