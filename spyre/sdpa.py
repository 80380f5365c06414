# SPDX-License-Identifier: Apache-2.0
"""Attention by torch's fused kernel."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headswap.spyre.native import Vectorised
from headswap.spyre.visibility import Feature, Scores


class Sdpa(Vectorised):
    """torch's `scaled_dot_product_attention`, which knows neither soft caps nor sinks."""

    name = "sdpa"
    features: frozenset[Feature] = frozenset(
        ("grouped", "bidirectional", "window", "alibi", "bias")
    )

    def padded(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores
    ) -> Tensor:
        """See `AttentionBackend`."""
        if scores.bias is not None:
            bias = scores.bias.to(query.dtype)
            mask = bias if mask is None else mask + bias
        found = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scores.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        return found.transpose(1, 2)
