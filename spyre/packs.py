# SPDX-License-Identifier: Apache-2.0
"""Rows in packs: one behind the other, without padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headswap.heads import end_marks
from headswap.registry.errors import InputError
from headswap.spyre.packing import PackedBatch, Segment
from headswap.spyre.prepare import Prepared
from headswap.spyre.pruning import LastRows
from headswap.spyre.rectangles import Ids

PACK_TOKENS = 2_048
"""Tokens a pack; from 512 to 4,096 the speed is the same (measured), the memory is not."""


def plan_packs(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Which rows run together: from long to short, in packs of at most `tokens` tokens (a longer
    row runs alone)."""
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    packs: list[list[int]] = []
    room = 0
    for row in order:
        if not packs or lengths[row] > room:
            packs.append([])
            room = tokens
        packs[-1].append(row)
        room -= lengths[row]
    return packs


def run_pack(made: Prepared, rows: Sequence[Ids], segments: Sequence[Ids] | None) -> Tensor:
    """What the head gets for `rows`, run as one pack: `[rows, hidden]`."""
    texts = [torch.tensor(row) for row in rows]
    own = None if segments is None else torch.tensor([[s for row in segments for s in row]])
    pooling = made.head_spec.pooling
    marks = end_marks(made.model.config) if pooling == "eos" else ()
    index = None if pooling == "mean" else pooled_places(texts, pooling, marks)
    last = LastRows(index) if made.prunes and index is not None else None
    states, batch = run_texts(made, texts, own, last)
    if index is None:  # the mean, in fp32: a sum in fp16 loses its last digits
        parts = [states[s.start : s.end].float().mean(dim=0) for s in batch.segments]
        return torch.stack(parts)
    found = states if last is not None else states.index_select(0, index)
    return made.pooler(found) if pooling == "pooler" else found


def run_texts(
    made: Prepared, texts: Sequence[Tensor], segments: Tensor | None = None,
    last: LastRows | None = None,
) -> tuple[Tensor, PackedBatch]:  # fmt: skip
    """The states `[tokens, hidden]` of `texts` (of the `last` rows alone), run as one pack."""
    ends = torch.tensor([len(text) for text in texts]).cumsum(0).tolist()
    batch = PackedBatch(tuple(map(Segment, [0, *ends[:-1]], ends)), ends[-1], last)
    places = torch.cat([made.positions(text) for text in texts])[None]
    found: Tensor = made.run(torch.cat(list(texts))[None], places, batch, segments)[0][0]
    return found, batch


def pooled_places(texts: Sequence[Tensor], pooling: str, marks: tuple[int, ...]) -> Tensor:
    """Where the pooled token of each text stands in the pack, int64 `[texts]`."""
    found, start = [], 0
    for row, text in enumerate(texts):
        own = 0 if pooling in ("first", "pooler") else len(text) - 1
        found.append(start + (_last_mark(row, text, marks) if pooling == "eos" else own))
        start += len(text)
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
