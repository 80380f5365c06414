# SPDX-License-Identifier: Apache-2.0
"""Attention over texts that stand one behind the other: no padding, CPU and GPU.

One call of torch's kernel a text, on strided views of the row; measured faster on CPU than a block
mask, nested tensors, flex attention and padding.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headswap.spyre.backends import Mode, Unable
from headswap.spyre.native import Native, joined
from headswap.spyre.packing import PackedBatch
from headswap.spyre.visibility import FEATURES, Scores, Visibility


class Packed(Unable):
    """Packs by torch's kernel where it has what a layer wants, else by plain operators."""

    name = "packed"
    modes: frozenset[Mode] = frozenset(("packed",))
    features = frozenset(FEATURES)

    def __init__(self) -> None:
        self._plain = Native()

    def packed(
        self, query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch,
        visibility: Visibility, scores: Scores,
    ) -> Tensor:  # fmt: skip
        """See `AttentionBackend`."""
        if scores.features():
            return self._plain.packed(query, key, value, batch, visibility, scores)
        grouped = query.shape[1] != key.shape[1]
        found = query.new_empty(1, batch.total, query.shape[1], value.shape[3])
        for segment in batch.segments:
            own = slice(segment.start, segment.end)
            keys, values = (joined(t, segment.prefix, own) for t in (key, value))
            seen = batch.seen(segment.end - segment.start, segment.before, visibility)
            found[:, own] = scaled_dot_product_attention(
                query[:, :, own], keys, values, attn_mask=seen, scale=scores.scale,
                is_causal=visibility.causal and seen is None, enable_gqa=grouped,
            ).transpose(1, 2)  # fmt: skip
        return found
