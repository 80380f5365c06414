# SPDX-License-Identifier: Apache-2.0
"""Attention as it is defined: one row, one head and one formula after the other, in fp32.

This is the specification that the other backends are tested against, and far too slow for use.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headswap.spyre.backends import Mode
from headswap.spyre.cache import PagedBatch, Pages
from headswap.spyre.masks import additive
from headswap.spyre.packing import PackedBatch
from headswap.spyre.visibility import FEATURES, Scores, Visibility


class Reference:
    """Everything, in every mode, in Python loops."""

    name = "reference"
    modes: frozenset[Mode] = frozenset(("padded", "paged", "packed"))
    features = frozenset(FEATURES)

    def padded(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores
    ) -> Tensor:
        """See `AttentionBackend`."""
        rows = []
        for b in range(query.shape[0]):
            shown = None if mask is None else mask[min(b, mask.shape[0] - 1)]
            bias = scores.bias
            rows.append(
                one_row(query[b], key[b], value[b], shown, scores,
                        None if bias is None else bias[min(b, bias.shape[0] - 1)])
            )  # fmt: skip
        return torch.stack(rows)

    def paged(
        self, query: Tensor, key: Tensor, value: Tensor, pages: Pages, batch: PagedBatch,
        visibility: Visibility, scores: Scores,
    ) -> Tensor:  # fmt: skip
        """See `AttentionBackend`."""
        size, rows = batch.block_size, []
        for b in range(query.shape[0]):
            for j in range(query.shape[2]):
                block, place = divmod(int(batch.slots[b, j]), size)
                pages.key[block, place] = key[b, :, j]
                pages.value[block, place] = value[b, :, j]
        for b in range(query.shape[0]):
            left, filled = int(batch.left[b]), int(batch.filled[b])
            at = [(int(batch.tables[b, k // size]), k % size) for k in range(left, filled)]
            keys = torch.stack([pages.key[block, place] for block, place in at], dim=1)
            values = torch.stack([pages.value[block, place] for block, place in at], dim=1)
            rows.append(
                _seen(query[b], keys, values, batch.places[b], torch.arange(left, filled),
                      visibility, scores)
            )  # fmt: skip
        return torch.stack(rows)

    def packed(
        self, query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch,
        visibility: Visibility, scores: Scores,
    ) -> Tensor:  # fmt: skip
        """See `AttentionBackend`."""
        found = query.new_zeros(batch.total, query.shape[1], value.shape[3])
        for segment in batch.segments:
            own = list(range(segment.start, segment.end))
            read = [*range(*(segment.prefix or (0, 0))), *own]
            places = torch.arange(len(read))
            found[own] = _seen(query[0, :, own], key[0, :, read], value[0, :, read],
                               places[segment.before :], places, visibility, scores)  # fmt: skip
        return found.unsqueeze(0)


def _seen(
    query: Tensor, key: Tensor, value: Tensor, asked: Tensor, stored: Tensor,
    visibility: Visibility, scores: Scores,
) -> Tensor:  # fmt: skip
    mask = additive(visibility.of(asked, stored), torch.float32).unsqueeze(0)
    return one_row(query, key, value, mask, scores, scores.distance(asked, stored))


def one_row(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores,
    bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """`[queries, heads, value_dim]` of `query` `[heads, queries, key_dim]`, `key` and `value`
    `[kv_heads, keys, dim]`, `mask` and `bias` `[1 or heads, queries, keys]`."""
    heads, shared = query.shape[0], query.shape[0] // key.shape[0]
    found = []
    for h in range(heads):
        score = query[h].float() @ key[h // shared].float().T * scores.scale
        if scores.softcap is not None:
            score = scores.softcap * torch.tanh(score / scores.softcap)
        for added in (bias, mask):
            if added is not None:
                score = score + added[min(h, added.shape[0] - 1)].float()
        if scores.sinks is not None:
            sink = scores.sinks[h].float().expand(score.shape[0], 1)
            weights = torch.softmax(torch.cat([score, sink], dim=-1), dim=-1)[:, :-1]
        else:
            weights = torch.softmax(score, dim=-1)
        found.append((weights @ value[h // shared].float()).to(query.dtype))
    return torch.stack(found, dim=1)
