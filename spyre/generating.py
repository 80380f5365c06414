# SPDX-License-Identifier: Apache-2.0
"""Greedy decoding of a causal language model over the paged cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from headswap.heads import end_marks
from headswap.spyre.cache import PagedBatch
from headswap.spyre.errors import DeviceError
from headswap.spyre.hook import BATCH, TOLD
from headswap.spyre.paging import Paged, Stored
from headswap.spyre.prepare import Prepared


def end_ids(made: Prepared, given: Any = None) -> frozenset[int]:
    """The ids that end a generated text: those `given` (one or several), else the generation
    config's, as transformers reads them, else the config's."""
    ends = given
    if ends is None:
        ends = getattr(getattr(made.model, "generation_config", None), "eos_token_id", None)
    if ends is None:
        ends = end_marks(made.model.config)
    ends = ends.tolist() if hasattr(ends, "tolist") else ends
    return frozenset((ends,) if isinstance(ends, int) else map(int, ends))


Run = Callable[[Tensor, Tensor, PagedBatch, int], Tensor]


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
    found: list[list[int]] = [[] for _ in prompts]
    waiting = list(enumerate(prompts))[::-1] if new > 0 else []
    with paged.held() as live, forward(paged) as run:
        while waiting or live:
            _join(paged, waiting, live, new, run)
            _finish(paged, live, found, new, ends)
            if live:
                logits = paged.step(live, run)[: len(live)]
                for sequence, token in zip(live, logits.argmax(dim=-1).tolist(), strict=True):
                    sequence.made.append(token)
                _finish(paged, live, found, new, ends)
    return found


@contextmanager
def forward(paged: Paged) -> Iterator[Run]:
    """The whole model as a function `(ids, places, batch, last)` -> logits `[batch, vocabulary]` of
    one token a row.

    The batch goes in by a keyword. Not every causal class hands that on (4.57's GPT-2), so without
    a compiled graph it is given where attention is called.
    """
    model = paged.made.model
    told: dict[str, Any] = {}
    keep = "logits_to_keep" in inspect.signature(model.forward).parameters

    def tell(module: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
        return arguments, {**keywords, **told}

    def run(ids: Tensor, places: Tensor, batch: PagedBatch, last: int) -> Tensor:
        given: dict[str, Any] = {"use_cache": False, "return_dict": True}
        if paged.static is not None:
            given[BATCH] = batch
        told[BATCH] = batch
        if keep:  # no logits of tokens that nobody reads
            given["logits_to_keep"] = torch.tensor([last])
        found: Tensor = model(input_ids=ids, attention_mask=TOLD, position_ids=places,
                              **given).logits  # fmt: skip
        return found[:, 0 if keep else last]

    modules = () if paged.static is not None else {module for module, _ in paged.made.layers}
    handles = [m.register_forward_pre_hook(tell, with_kwargs=True) for m in modules]
    try:
        yield run
    finally:
        for handle in handles:
            handle.remove()


def _join(
    paged: Paged, waiting: list[tuple[int, list[int]]], live: list[Stored], new: int,
    run: Run,
) -> None:  # fmt: skip
    """Take in as many waiting prompts as there is room for, and run them."""
    while waiting and len(live) < paged.rows:
        row, prompt = waiting[-1]
        if not paged.fits(prompt, new, live):
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
