# SPDX-License-Identifier: Apache-2.0
"""Greedy decoding of a causal language model over the paged cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headswap.heads import end_marks
from headswap.spyre.cache import PagedBatch
from headswap.spyre.compiling import outer_layers
from headswap.spyre.errors import DeviceError, NonFiniteError
from headswap.spyre.hook import BATCH, TOLD
from headswap.spyre.paging import Paged, Stored
from headswap.spyre.prepare import Prepared
from headswap.spyre.processors import Processors, most_likely


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


def refuse_broken(rows: list[int], found: list[list[int]]) -> None:
    """Raise `NonFiniteError` naming `rows`, whose logits are no numbers any more."""
    if rows:
        raise NonFiniteError(
            f"Rows {rows} of {len(found)} gave logits that are no numbers; what was made before, "
            "and the other rows, stand in the error's .values.",
            rows=tuple(rows), values=found,
        )  # fmt: skip


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
    processors = Processors(getattr(model, "generation_config", None), ends)
    for row, prompt in enumerate(prompts):
        paged.check(row, len(prompt), new)
    found: list[list[int]] = [[] for _ in prompts]
    broken: set[int] = set()
    waiting = list(enumerate(prompts))[::-1] if new > 0 else []
    with paged.held() as live, forward(paged) as run:
        while waiting or live:
            _join(paged, waiting, live, new, run, processors)
            broken |= _finish(paged, live, found, new, ends)
            if live:
                logits = paged.step(live, run)[: len(live)]
                for sequence, own in zip(live, logits, strict=True):
                    _take(sequence, own)
                broken |= _finish(paged, live, found, new, ends)
    refuse_broken(sorted(broken), found)
    return found


@contextmanager
def forward(paged: Paged) -> Iterator[Run]:
    """The whole model as a function `(ids, places, batch, last)` -> logits `[batch, vocabulary]` of
    one token a row.

    The batch is a keyword of the layers, given to them: not every causal class hands one on (4.57's
    GPT-2).
    """
    model = paged.made.model
    told: dict[str, Any] = {}
    keep = "logits_to_keep" in inspect.signature(model.forward).parameters

    def run(ids: Tensor, places: Tensor, batch: PagedBatch, last: int) -> Tensor:
        given: dict[str, Any] = {"use_cache": False, "return_dict": True}
        told[BATCH] = batch
        if keep:  # no logits of tokens that nobody reads
            given["logits_to_keep"] = torch.tensor([last])
        found: Tensor = model(input_ids=ids, attention_mask=TOLD, position_ids=places,
                              **given).logits  # fmt: skip
        return found[:, 0 if keep else last]

    layers = outer_layers(paged.made.backbone)
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        vars(layer)["forward"] = partial(_told, layer.forward, told)
    try:
        yield run
    finally:
        for layer, own in zip(layers, before, strict=True):
            del vars(layer)["forward"]
            if own is not None:
                vars(layer)["forward"] = own


def _told(forward: Any, told: dict[str, Any], *given: Any, **named: Any) -> Any:
    return forward(*given, **{**named, **told})


def _join(
    paged: Paged, waiting: list[tuple[int, list[int]]], live: list[Stored], new: int,
    run: Run, processors: Processors,
) -> None:  # fmt: skip
    """Take in as many waiting prompts as there is room for, and run them."""
    while waiting and len(live) < paged.rows:
        row, prompt = waiting[-1]
        if not paged.fits(prompt, new, live):
            return
        waiting.pop()
        sequence = paged.admit(row, prompt, new)
        live.append(sequence)
        sequence.processors = processors.of(len(prompt))
        _take(sequence, paged.prefill(sequence, run)[0])


def _take(sequence: Stored, logits: Tensor) -> None:
    """Add the most likely id by `logits` `[vocabulary]`, if there is one."""
    sequence.broken = bool(logits.isnan().any())
    if sequence.broken:
        return
    ids = [*sequence.ids, *sequence.made]
    sequence.made.append(most_likely(logits, ids, sequence.processors))


def _finish(
    paged: Paged, live: list[Stored], found: list[list[int]], new: int, ends: frozenset[int]
) -> set[int]:
    """Take out the sequences that are done; returns the rows of those whose logits broke."""
    done = [s for s in live if s.broken or len(s.made) >= new or s.made[-1] in ends]
    for sequence in done:
        live.remove(sequence)
        paged.release(sequence)
        found[sequence.row] = sequence.made
    return {sequence.row for sequence in done if sequence.broken}
