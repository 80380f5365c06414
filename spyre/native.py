# SPDX-License-Identifier: Apache-2.0
"""Attention in plain operators: no loop over tokens, no fused kernel, every feature."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headswap.spyre.backends import Mode
from headswap.spyre.cache import PagedBatch, Pages
from headswap.spyre.packing import PackedBatch
from headswap.spyre.visibility import FEATURES, Feature, Scores, Visibility


class Vectorised:
    """What `native` and `sdpa` share: pages and packs reduced to padded attention."""

    name: str
    modes: frozenset[Mode] = frozenset(("padded", "paged", "packed"))
    features: frozenset[Feature]

    def padded(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores
    ) -> Tensor:
        """See `AttentionBackend`."""
        raise NotImplementedError

    def paged(
        self, query: Tensor, key: Tensor, value: Tensor, pages: Pages, batch: PagedBatch,
        visibility: Visibility, scores: Scores,
    ) -> Tensor:  # fmt: skip
        """See `AttentionBackend`."""
        pages.store(_tokens(key), _tokens(value), batch.slots.flatten())
        keys, values = pages.read(batch)
        if scores.slopes is not None:
            scores = at(scores, batch.places, torch.arange(keys.shape[2]))
        return self.padded(query, keys, values, batch.mask(visibility, query.dtype), scores)

    def packed(
        self, query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch,
        visibility: Visibility, scores: Scores,
    ) -> Tensor:  # fmt: skip
        """See `AttentionBackend`."""
        found = []
        for segment in batch.segments:
            own = slice(segment.start, segment.end)
            keys, values = (joined(t, segment.prefix, own) for t in (key, value))
            places = torch.arange(keys.shape[2])
            visible = batch.additive(segment, visibility, query.dtype)
            found.append(
                self.padded(query[:, :, own], keys, values, visible,
                            at(scores, places[segment.before :], places))
            )  # fmt: skip
        return torch.cat(found, dim=1)


class Native(Vectorised):
    """Query heads that share keys are folded into the queries, so nothing is expanded."""

    name = "native"
    features = frozenset(FEATURES)

    def padded(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores
    ) -> Tensor:
        """See `AttentionBackend`."""
        batch, heads, queries, _ = query.shape
        kv_heads, keys = key.shape[1:3]
        folded = query.reshape(batch, kv_heads, -1, query.shape[-1])
        score = folded @ key.transpose(-1, -2) * scores.scale
        score = score.view(batch, heads, queries, keys)
        if scores.softcap is not None:
            score = scores.softcap * torch.tanh(score / scores.softcap)
        for added in (scores.bias, mask):
            score = score if added is None else score + added
        weights = _softmax(score, scores.sinks)
        found = weights.view(batch, kv_heads, -1, keys) @ value
        return found.view(batch, heads, queries, -1).transpose(1, 2)


def _softmax(score: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return torch.softmax(score, dim=-1)
    sink = sinks.to(score.dtype).view(1, -1, 1, 1).expand(*score.shape[:3], 1)
    return torch.softmax(torch.cat([score, sink], dim=-1), dim=-1)[..., :-1]


def at(scores: Scores, query: Tensor, key: Tensor) -> Scores:
    """`scores` with ALiBi's slopes turned into a bias for these positions."""
    distance = scores.distance(query, key)
    if distance is None:
        return scores
    distance = distance if distance.dim() == 4 else distance.unsqueeze(0)
    return replace(scores, slopes=None, bias=distance)


def _tokens(states: Tensor) -> Tensor:
    """`[batch, heads, tokens, dim]` as `[batch x tokens, heads, dim]`."""
    return states.transpose(1, 2).flatten(0, 1)


def joined(states: Tensor, prefix: tuple[int, int] | None, own: slice) -> Tensor:
    """Keys or values of a segment's prefix, if it has one, and of its `own` tokens."""
    if prefix is None:
        return states[:, :, own]
    return torch.cat([states[:, :, prefix[0] : prefix[1]], states[:, :, own]], dim=2)
