# SPDX-License-Identifier: Apache-2.0
"""Rows in packs: one behind the other, without padding, and what several begin with once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headswap.heads import end_marks
from headswap.registry.errors import InputError
from headswap.spyre.packing import PackedBatch, Segment
from headswap.spyre.prefixes import Group, places_of
from headswap.spyre.prepare import Prepared
from headswap.spyre.pruning import LastRows
from headswap.spyre.rectangles import Ids

PACK_TOKENS = 2_048
"""Tokens a pack; from 512 to 4,096 the speed is the same (measured), the memory is not."""


@dataclass(frozen=True, slots=True, eq=False)
class Laid:
    """Texts in one row.

    ids, places  `[1, tokens]`: the ids, and their positions in their text
    segments     one a text, and one before them a beginning that texts share
    parts        where each text's tokens stand: (start, end) of its beginning and of the rest
    """

    ids: Tensor
    places: Tensor
    segments: tuple[Segment, ...]
    parts: list[list[tuple[int, int]]]

    @classmethod
    def of(cls, made: Prepared, groups: Sequence[tuple[int, Sequence[Tensor]]]) -> Laid:
        """`groups` of texts, each with how many tokens its texts begin with alike."""
        ids: list[Tensor] = []
        places: list[Tensor] = []
        segments: list[Segment] = []
        parts: list[list[tuple[int, int]]] = []
        total = 0
        for shared, texts in groups:
            known: list[tuple[int, int]] = []
            for text in texts:
                own = made.positions(text)
                if shared and not known:
                    ids.append(text[:shared])
                    places.append(own[:shared])
                    known = [(total, total + shared)]
                    segments.append(Segment(*known[0]))
                    total += shared
                ids.append(text[shared:])
                places.append(own[shared:])
                where = (total, total + len(text) - shared)
                segments.append(Segment(*where, *known))
                parts.append([*known, where])
                total = where[1]
        return cls(torch.cat(ids)[None], torch.cat(places)[None], tuple(segments), parts)

    def place(self, row: int, token: int) -> int:
        """Where a token of the text `row` stands."""
        start, end = self.parts[row][0]
        if start + token < end:
            return start + token
        return self.parts[row][-1][0] + token - (end - start)

    def texts(self, states: Tensor) -> list[Tensor]:
        """Of `states` `[tokens, ...]`, those of each text."""
        return [torch.cat([states[start:end] for start, end in parts]) for parts in self.parts]

    def last(self, index: Tensor) -> LastRows:
        """The last layer for the rows at `index` `[texts]` alone."""
        starts = [segment.start for segment in self.segments]
        found = [self.segments[bisect_right(starts, place) - 1] for place in index.tolist()]
        return LastRows(index, tuple(found))


def run_pack(
    made: Prepared, rows: Sequence[Ids], segments: Sequence[Ids] | None, pack: Sequence[Group]
) -> Tensor:
    """What the head gets for those of `rows` that are in `pack`, group by group: `[texts, hidden]`.
    With `segments` no group shares anything."""
    texts = [[torch.tensor(rows[row]) for row in group.rows] for group in pack]
    laid = Laid.of(made, [(group.shared, own) for group, own in zip(pack, texts, strict=True)])
    kinds = None
    if segments is not None:
        kinds = torch.tensor([[s for row in places_of(pack) for s in segments[row]]])
    pooling = made.head_spec.pooling
    if pooling == "mean":  # in fp32: a sum in fp16 loses its last digits
        states = run_laid(made, laid, kinds)
        return torch.stack([own.float().mean(dim=0) for own in laid.texts(states)])
    marks = end_marks(made.model.config) if pooling == "eos" else ()
    index = pooled_places(laid, [text for own in texts for text in own], pooling, marks)
    last = laid.last(index) if made.prunes else None
    states = run_laid(made, laid, kinds, last)
    found = states if last is not None else states.index_select(0, index)
    return made.pooler(found) if pooling == "pooler" else found


def run_laid(
    made: Prepared, laid: Laid, segments: Tensor | None = None, last: LastRows | None = None
) -> Tensor:
    """The states `[tokens, hidden]` of `laid`, or of the `last` rows alone."""
    batch = PackedBatch(laid.segments, laid.ids.shape[1], last)
    found: Tensor = made.run(laid.ids, laid.places, batch, segments)[0][0]
    return found


def run_texts(made: Prepared, texts: Sequence[Tensor]) -> Tensor:
    """The states `[tokens, hidden]` of `texts`, run as one pack."""
    return run_laid(made, Laid.of(made, [(0, texts)]))


def pooled_places(
    laid: Laid, texts: Sequence[Tensor], pooling: str, marks: tuple[int, ...]
) -> Tensor:
    """Where the pooled token of each text stands in the pack, int64 `[texts]`."""
    found = []
    for row, text in enumerate(texts):
        own = 0 if pooling in ("first", "pooler") else len(text) - 1
        found.append(laid.place(row, _last_mark(row, text, marks) if pooling == "eos" else own))
    return torch.tensor(found)


def _last_mark(row: int, text: Tensor, marks: tuple[int, ...]) -> int:
    found = torch.isin(text, torch.tensor(marks)).nonzero()
    if not len(found):
        raise InputError(
            f"Rows [{row}] hold no end mark ({', '.join(map(str, marks))}); remove them or mend "
            "the mask.",
            rows=(row,),
        )
    return int(found[-1])
