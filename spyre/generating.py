# SPDX-License-Identifier: Apache-2.0
"""Greedy decoding of a causal language model over the paged cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headswap.spyre.errors import DeviceError
from headswap.spyre.paging import Paged, Stored, backbone_inputs


def generate(
    paged: Paged, prompts: Sequence[list[int]], new: int, ends: frozenset[int]
) -> list[list[int]]:
    """The most likely next ids after each prompt, in the prompts' order: at most `new`, and none
    behind an end mark (which is kept, as transformers keeps it).

    A prompt joins as soon as its blocks are free; the others go on meanwhile.
    """
    model = paged.made.model
    if model.get_output_embeddings() is None:
        raise DeviceError(
            f"{type(model).__name__} has no output embedding, so it generates nothing; pass the "
            "causal language model itself."
        )
    for row, prompt in enumerate(prompts):
        paged.check(row, len(prompt), new)
    run = Forward(paged)
    found: list[list[int]] = [[] for _ in prompts]
    waiting = list(enumerate(prompts))[::-1] if new > 0 else []
    with paged.held() as live:
        while waiting or live:
            _join(paged, waiting, live, new, run)
            _finish(paged, live, found, new, ends)
            if live:
                logits = paged.step(live, run)[: len(live)]
                for sequence, token in zip(live, logits.argmax(dim=-1).tolist(), strict=True):
                    sequence.made.append(token)
                _finish(paged, live, found, new, ends)
    return found


class Forward:
    """Logits `[batch, vocabulary]` of the last token of a chunk or step, from the whole model."""

    def __init__(self, paged: Paged) -> None:
        self._made = paged.made
        names = inspect.signature(paged.made.model.forward).parameters
        self._keep = "logits_to_keep" in names

    def __call__(self, ids: Tensor, places: Tensor, batch: Any, last: int) -> Tensor:
        """See `Paged.prefill`."""
        given = backbone_inputs(self._made, ids, places, batch)
        if self._keep:  # no logits of tokens that nobody reads
            given["logits_to_keep"] = torch.tensor([last])
        logits: Tensor = self._made.model(**given).logits
        return logits[:, 0 if self._keep else last]


def _join(
    paged: Paged, waiting: list[tuple[int, list[int]]], live: list[Stored], new: int,
    run: Forward,
) -> None:  # fmt: skip
    """Take in as many waiting prompts as there is room for, and run them."""
    while waiting and len(live) < paged.spec.max_decode_batch:
        row, prompt = waiting[-1]
        if not paged.fits(prompt, new):
            return
        waiting.pop()
        sequence = paged.admit(row, prompt, new)
        live.append(sequence)
        sequence.made.append(int(paged.prefill(sequence, run).argmax()))


def _finish(
    paged: Paged, live: list[Stored], found: list[list[int]], new: int, ends: frozenset[int]
) -> None:
    for sequence in [s for s in live if len(s.made) >= new or s.made[-1] in ends]:
        live.remove(sequence)
        paged.release(sequence)
        found[sequence.row] = sequence.made
