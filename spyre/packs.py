# SPDX-License-Identifier: Apache-2.0
"""Rows in packs: one behind the other, without padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headswap.registry.errors import InputError
from headswap.spyre.packing import PackedBatch, Segment
from headswap.spyre.prepare import Prepared
from headswap.spyre.rectangles import Ids, end_marks

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
    ends = torch.tensor([len(row) for row in rows]).cumsum(0).tolist()
    batch = PackedBatch(tuple(map(Segment, [0, *ends[:-1]], ends)), ends[-1])
    ids = torch.cat(texts)[None]
    places = torch.cat([made.positions(text) for text in texts])[None]
    own = None if segments is None else torch.tensor([[s for row in segments for s in row]])
    states = made.run(ids, places, batch, own)[0][0]
    return _pooled(made, states, batch, texts)


def _pooled(made: Prepared, states: Tensor, batch: PackedBatch, texts: list[Tensor]) -> Tensor:
    """Rows `[texts, hidden]` out of `states` `[tokens, hidden]`."""
    pooling = made.model.head_spec.pooling
    if pooling == "mean":  # in fp32: a sum in fp16 loses its last digits
        parts = [states[s.start : s.end].float().mean(dim=0) for s in batch.segments]
        return torch.stack(parts)
    if pooling in ("first", "pooler"):
        index = torch.tensor([segment.start for segment in batch.segments])
        rows = states.index_select(0, index)
        return made.pooler(rows) if pooling == "pooler" else rows
    last = [segment.end - 1 for segment in batch.segments]
    if pooling == "eos":
        marks = end_marks(made)
        last = [s.start + _last_mark(i, text, marks)
                for i, (s, text) in enumerate(zip(batch.segments, texts, strict=True))]  # fmt: skip
    return states.index_select(0, torch.tensor(last))


def _last_mark(row: int, text: Tensor, marks: tuple[int, ...]) -> int:
    found = torch.isin(text, torch.tensor(marks)).nonzero()
    if not len(found):
        raise InputError(
            f"Rows [{row}] hold no end mark ({', '.join(map(str, marks))}); remove them or mend "
            "the mask.",
            rows=(row,),
        )
    return int(found[-1])
