# SPDX-License-Identifier: Apache-2.0
"""Paged attention as operators, with the contract of the Spyre stack's own, in our namespace.

`headswap::paged_store` and `headswap::paged_attention` take what FMS' `spyre::paged_attn_store` and
`spyre::paged_attn_compute` take, and what those lack (window, soft cap, slopes, sinks). A compiler
sees one node a call. Where FMS is installed and a layer wants nothing more, its names are called,
since torch_sendnn knows those.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from headswap.spyre.backends import Mode, Unable
from headswap.spyre.cache import PagedBatch, Pages
from headswap.spyre.errors import AttentionError
from headswap.spyre.native import Native, at
from headswap.spyre.visibility import FEATURES, Feature, Scores, Visibility


@torch.library.custom_op("headswap::paged_store", mutates_args=())
def paged_store(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """New caches `[blocks, block_size, kv_heads, head_dim]` with `key` and `value`
    `[batch, queries, kv_heads, head_dim]` at `slot_mapping` `[batch, queries]` (int64); the given
    ones stay as they are (FMS' contract)."""
    pages = Pages(key_cache.clone(), value_cache.clone())
    pages.store(key.flatten(0, 1), value.flatten(0, 1), slot_mapping.flatten())
    return pages.key, pages.value


@paged_store.register_fake
def _(key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any) -> Any:
    return torch.empty_like(key_cache), torch.empty_like(value_cache)


@torch.library.custom_op("headswap::paged_store_", mutates_args=("key_cache", "value_cache"))
def paged_store_(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """As `paged_store`, written into the given caches."""
    pages = Pages(key_cache, value_cache)
    pages.store(key.flatten(0, 1), value.flatten(0, 1), slot_mapping.flatten())


@paged_store_.register_fake
def _(key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any) -> None:
    return None


@torch.library.custom_op("headswap::paged_attention", mutates_args=())
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scale: float,
    current_tkv_mask: Tensor,
    left_padded_prompt_mask: Tensor,
    block_table: Tensor,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention `[batch, queries, heads, head_dim]` of `query` (same shape) over the blocks of
    `block_table` `[batch, blocks]`.

    Query j of row b stands at place current_tkv_mask[b] - queries + j, and sees the keys from
    left_padded_prompt_mask[b] to there, nearer than `window`. A query that sees none gives zero,
    as FMS' operator does.
    """
    batch = PagedBatch(
        tables=block_table,
        slots=torch.empty(query.shape[:2], dtype=torch.int64),
        filled=current_tkv_mask, left=left_padded_prompt_mask, block_size=key_cache.shape[1],
    )  # fmt: skip
    rule = Visibility(causal, window)
    scores = Scores(scale, softcap=softcap, slopes=slopes, sinks=sinks)
    keys, values = Pages(key_cache, value_cache).read(batch)
    placed = at(scores, batch.places, torch.arange(keys.shape[2]))
    found = Native().padded(
        query.transpose(1, 2), keys, values, batch.mask(rule, query.dtype), placed
    )
    seeing = batch.seen(rule).any(dim=-1).transpose(1, 2).unsqueeze(-1)
    return torch.where(seeing, found, torch.zeros((), dtype=found.dtype)).contiguous()


@paged_attention.register_fake
def _(query: Any, key_cache: Any, value_cache: Any, *more: Any, **named: Any) -> Any:
    return query.new_empty(*query.shape[:3], value_cache.shape[3])


class Operators(Unable):
    """Paged attention by the operators above; whole rows by plain ones."""

    name = "operators"
    modes: frozenset[Mode] = frozenset(("padded", "paged"))
    features: frozenset[Feature] = frozenset(FEATURES)

    def __init__(self) -> None:
        self._plain = Native()

    def padded(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores
    ) -> Tensor:
        """See `AttentionBackend`."""
        return self._plain.padded(query, key, value, mask, scores)

    def paged(
        self, query: Tensor, key: Tensor, value: Tensor, pages: Pages, batch: PagedBatch,
        visibility: Visibility, scores: Scores,
    ) -> Tensor:  # fmt: skip
        """See `AttentionBackend`."""
        if scores.bias is not None:
            raise AttentionError(
                "Attention backend 'operators' takes no bias over pages.", name=self.name
            )
        keys, values, queries = (t.transpose(1, 2).contiguous() for t in (key, value, query))
        found: Tensor
        plain = not scores.features() and visibility == Visibility(True)
        if plain and fms_operators():
            fms = torch.ops.spyre
            cached = fms.paged_attn_store(keys, values, pages.key, pages.value, batch.slots)
            found = fms.paged_attn_compute(
                queries, *cached, scores.scale, batch.filled, batch.left, batch.tables
            )
            pages.key.copy_(cached[0])
            pages.value.copy_(cached[1])
            return found
        paged_store_(keys, values, pages.key, pages.value, batch.slots)
        found = paged_attention(
            queries, pages.key, pages.value, scores.scale, batch.filled, batch.left, batch.tables,
            visibility.causal, visibility.window, scores.softcap, scores.slopes, scores.sinks,
        )  # fmt: skip
        return found


def fms_operators() -> bool:
    """Whether FMS' paged operators are there: it was imported by who drives the card."""
    return "fms.utils.spyre.paged" in sys.modules
