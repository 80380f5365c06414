# SPDX-License-Identifier: Apache-2.0
"""Rows in rectangles: padded up to a shape, the way a card wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headswap.heads import end_marks, pool, pooled_index
from headswap.spyre.device import PadSide
from headswap.spyre.masks import real_tokens
from headswap.spyre.prepare import Prepared
from headswap.spyre.shapes import Shape

Ids = Sequence[int]


def run_rectangle(
    made: Prepared, rows: Sequence[Ids], segments: Sequence[Ids] | None, shape: Shape,
    side: PadSide,
) -> Tensor:  # fmt: skip
    """What the head gets for `rows`, run as `shape` with filler rows: `[rows, hidden]`."""
    lengths = [len(row) for row in rows]
    extra = shape.batch - len(rows)
    if not made.hooked:  # a backbone that runs its own way: pads that it may see stand behind
        side = "right"
    real = real_tokens([*lengths, *[lengths[0]] * extra], shape.length, side)
    filler = [rows[0]] * extra
    ids = _filled([*rows, *filler], real, made.pad)
    own = None if segments is None else _filled([*segments, *[segments[0]] * extra], real)
    if not made.hooked:
        return _by_model(made, ids, real, own)[: len(rows)]
    places = [made.positions(torch.tensor(row)).tolist() for row in [*rows, *filler]]
    found = _states(made, ids, real, _filled(places, real), own)
    return pooled(made, found, real, ids)[: len(rows)]


def pooled(made: Prepared, output: Any, real: Tensor, ids: Tensor) -> Tensor:
    """The rows `[batch, hidden]` that the head is put on; `output` is the backbone's."""
    spec = made.model.head_spec
    if spec.pooling == "pooler":
        return made.pooler(pool(output[0], real, "first"))
    index = pooled_index(spec.pooling, real, ids, end_marks(made.model.config))
    return pool(output[0], real, spec.pooling, index)


def _filled(rows: Sequence[Ids], real: Tensor, fill: int = 0) -> Tensor:
    """Numbers `[batch, length]` at the real places, `fill` elsewhere."""
    ids = torch.full(real.shape, fill)
    ids[real] = torch.tensor([each for row in rows for each in row])
    return ids


def _states(
    made: Prepared, ids: Tensor, real: Tensor, places: Tensor, segments: Tensor | None
) -> Any:
    given: dict[str, Any] = {
        "input_ids": ids, "attention_mask": real.long(), "position_ids": places,
    }  # fmt: skip
    if made.segments or segments is not None:
        given["token_type_ids"] = torch.zeros_like(ids) if segments is None else segments
    if "use_cache" in made.inputs:
        given["use_cache"] = False
    made.settle()
    return made.backbone(**given, return_dict=True)


def _by_model(made: Prepared, ids: Tensor, real: Tensor, segments: Tensor | None) -> Tensor:
    """A backbone with attention of its own, by our model's way."""
    made.settle()
    given = {"input_ids": ids, "attention_mask": real.long()}
    if segments is not None:
        given["token_type_ids"] = segments
    if made.pools:
        rows: Tensor = made.model.rows(given).values
        return rows
    logits: Tensor = made.model(**given).logits  # the head runs on every token, or inside
    return logits
