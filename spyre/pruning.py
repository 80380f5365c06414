# SPDX-License-Identifier: Apache-2.0
"""The last layer computed for the rows that are pooled, and for no other.

A classifier reads one row of a text. Its last layer needs keys and values of every token, but a
query, an output projection and a feed-forward of that row only. No model code is written again: the
layer runs once up to its attention, which keeps keys and values and ends it there, and once more on
the pooled rows alone, whose queries meet the kept ones.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headswap.spyre.compiling import outer_layers
from headswap.spyre.hook import BATCH
from headswap.spyre.native import Native, at, joined
from headswap.spyre.packing import PackedBatch, Segment
from headswap.spyre.visibility import Scores, Visibility

if TYPE_CHECKING:
    from headswap.spyre.prepare import Prepared


class Kept(Exception):  # noqa: N818 - no error: it ends a layer whose keys and values are kept
    """Raised by attention when it has kept a layer's keys and values."""


@dataclass(eq=False)
class LastRows:
    """The pooled `rows` `[texts]` (int64, places in the pack) with the segment of each, and the
    last layer's keys and values once they are there."""

    rows: Tensor
    segments: tuple[Segment, ...]
    now: bool = False
    key: Tensor | None = None
    value: Tensor | None = None

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, visibility: Visibility, scores: Scores
    ) -> Tensor:
        """Keep `key` and `value` and end the layer, or let the rows' `query`
        `[1, heads, texts, key_dim]` meet what was kept: `[1, texts, heads, value_dim]`."""
        if self.key is None or self.value is None:
            self.key, self.value = key, value
            raise Kept
        found = [
            _row(query[:, :, i : i + 1], self.key, self.value, segment, place, visibility, scores)
            for i, (segment, place) in enumerate(zip(self.segments, self.rows.tolist(),
                                                     strict=True))
        ]  # fmt: skip
        return torch.cat(found, dim=1)


def _row(
    query: Tensor, key: Tensor, value: Tensor, segment: Segment, place: int,
    visibility: Visibility, scores: Scores,
) -> Tensor:  # fmt: skip
    own = torch.tensor([segment.before + place - segment.start])
    places = torch.arange(segment.before + segment.end - segment.start)
    seen = visibility.of(own, places)[0].nonzero().flatten()
    start, end = int(seen[0]), int(seen[-1]) + 1
    tokens = slice(segment.start, segment.end)
    keys, values = (joined(t, segment.prefix, tokens)[:, :, start:end] for t in (key, value))
    if scores.features():
        placed = at(scores, own, places[start:end])
        return Native().padded(query, keys, values, None, placed)
    return torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, scale=scores.scale, enable_gqa=query.shape[1] != key.shape[1]
    ).transpose(1, 2)


def prune_last_layer(backbone: nn.Module) -> None:
    """Let the last layer of `backbone` (a copy) look at a batch's `last` rows."""
    layer = outer_layers(backbone)[-1]
    vars(layer)["forward"] = partial(_forward, layer.forward)


def keep_last_layer(made: Prepared) -> None:
    """Undo `prune_last_layer`: where layers are compiled, the last one shares the others' graph."""
    made.prunes = False
    layers = outer_layers(made.backbone)
    layer = layers[-1] if layers else None
    own = None if layer is None else vars(layer).get("forward")
    if layer is None or not isinstance(own, partial) or own.func is not _forward:
        return
    del vars(layer)["forward"]
    if layer.forward != own.args[0]:  # somebody's own, which stood there before
        vars(layer)["forward"] = own.args[0]


def _forward(forward: Any, hidden: Tensor, *given: Any, **named: Any) -> Any:
    batch = named.get(BATCH)
    last: LastRows | None = batch.last if isinstance(batch, PackedBatch) else None
    if last is None:
        return forward(hidden, *given, **named)
    last.now = True
    with suppress(Kept):
        forward(hidden, *given, **named)
    total = hidden.shape[1]
    chosen = partial(_chosen, rows=last.rows, total=total)
    try:
        return forward(chosen(hidden), *map(chosen, given),
                       **{name: chosen(value) for name, value in named.items()})  # fmt: skip
    finally:
        last.now = False


def _chosen(value: Any, rows: Tensor, total: int) -> Any:
    """What belongs to the pooled rows of an argument that has one entry a token."""
    if isinstance(value, tuple):
        return tuple(_chosen(each, rows, total) for each in value)
    if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == total:
        return value.index_select(1, rows)
    return value
