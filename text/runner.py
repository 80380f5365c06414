# SPDX-License-Identifier: Apache-2.0
"""Runs encoded texts through a model, like lengths together, and returns rows in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from headswap.registry.errors import ConversionError, InputError
from headswap.text.answers import check_columns
from headswap.text.batches import Batches
from headswap.text.encode import Encoded, collate
from headswap.text.given import is_whole, whole_number
from headswap.text.lengths import Limit, usable_length
from headswap.text.running import device_of, evaluating, takes_segments, vocabulary
from headswap.text.source import Source

Progress = Callable[[int, int], None]
Function = Callable[[dict[str, Tensor]], Tensor]


class Runner:
    """One model with its limit of tokens (`.limit`), the number of texts in a run, and the executor
    that runs it, if there is one."""

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        max_length: int | None,
    ) -> None:
        batch_size = whole_number("batch_size", batch_size, 1)
        self.model, self.executor = source.model, source.executor
        self.batch_size, self._pad_id = _padding(source.model, source.tokenizer, batch_size)
        if self.executor is None:
            self._batches = Batches(source.model, self.batch_size, self._pad_id)
        self._vocabulary = vocabulary(source.model)
        self._segments = takes_segments(source.model)
        folder = source.checkpoint.folder if source.checkpoint is not None else None
        self.limit = _limit(usable_length(source.model, source.tokenizer, folder), max_length)

    def run(
        self, rows: Sequence[Encoded], function: Function, progress: Progress | None = None
    ) -> Tensor:
        """What `function` gives for the model's inputs, `[batch, ...]` each, as fp32 `[rows, ...]`
        on the CPU, in the order of `rows`; rows of like lengths share a batch.
        """
        found = self.each(rows, function, progress)
        return torch.stack(found) if found else torch.empty(0)

    def each(
        self, rows: Sequence[Encoded], function: Function, progress: Progress | None = None
    ) -> list[Tensor]:
        """As `run`, one tensor a row, which may differ in shape from batch to batch."""
        self.check_ids(rows)
        found: list[Tensor] = [torch.empty(0)] * len(rows)
        done = 0
        with evaluating(self.model), torch.inference_mode():
            for chosen in self._batches.of([len(row.ids) for row in rows]):
                batch = self._batch([rows[i] for i in chosen])
                with self._batches.running():
                    values = function(batch).float().cpu()
                for i, value in zip(chosen, values, strict=True):
                    found[i] = value
                done += len(chosen)
                if progress is not None:
                    progress(done, len(rows))
        return found

    def check_ids(self, rows: Sequence[Encoded]) -> None:
        """Refuse ids that the model has no vector for, on a GPU an assertion that ends the process.

        A tokenizer of another model gives such ids, and so may a caller.
        """
        size = self._vocabulary
        if size is None:
            return
        unknown = {i: [each for each in (min(row.ids), max(row.ids)) if not 0 <= each < size]
                   for i, row in enumerate(rows)}  # fmt: skip
        wrong = tuple(i for i in unknown if unknown[i])
        if wrong:
            raise InputError(
                f"Text {wrong[0]} has the token id {unknown[wrong[0]][0]}, and the model knows 0 "
                f"to {size - 1}; is this its tokenizer?",
                rows=wrong,
            )

    def logits(
        self, rows: Sequence[Encoded], labels: Sequence[str], progress: Progress | None = None
    ) -> Tensor:
        """fp32 logits `[rows, labels]`; `LabelError` where the model gives another shape."""
        if self.executor is not None:
            return self._by_executor(self.executor.logits, rows, labels, progress)

        def function(batch: dict[str, Tensor]) -> Tensor:
            logits: Tensor = self.model(**batch).logits
            check_columns(logits.shape, len(batch["input_ids"]), labels)
            return logits

        found = self.run(rows, function, progress)
        return found if len(rows) else found.reshape(0, len(labels))

    def vectors(self, rows: Sequence[Encoded], progress: Progress | None = None) -> Tensor | None:
        """fp32 vectors `[rows, hidden]` of an embedding model, where an executor runs it."""
        if self.executor is None:
            return None
        return self._by_executor(self.executor.embed, rows, None, progress)

    def _by_executor(
        self, run: Any, rows: Sequence[Encoded], labels: Sequence[str] | None,
        progress: Progress | None,
    ) -> Tensor:  # fmt: skip
        self.check_ids(rows)
        kinds = [row.types or [0] * len(row.ids) for row in rows]
        given = kinds if self._segments and any(row.types for row in rows) else None
        found: Tensor = run([row.ids for row in rows], given, progress=progress)
        if labels is not None and rows:
            check_columns(found.shape, len(rows), labels)
        return found

    def _batch(self, rows: Sequence[Encoded]) -> dict[str, Tensor]:
        batch = collate(rows, self._pad_id)
        if not self._segments:
            batch.pop("token_type_ids", None)
        device = device_of(self.model)
        return {name: value.to(device) for name, value in batch.items()}


def _padding(model: Any, tokenizer: Any, batch_size: int) -> tuple[int, int]:
    """Texts in a batch, and the id to pad with.

    Our models go by the mask, so any id will do; transformers' own score heads search for their
    config's pad id, and without one they take a text at a time. So do its heads that pool by place.
    """
    own = hasattr(model, "head_spec")
    pad = tokenizer.pad_token_id if own else model.config.get_text_config().pad_token_id
    if pad is None or (not own and _pools_by_place(model)):
        return (batch_size if own else 1), pad or 0
    return batch_size, int(pad)


def _pools_by_place(model: Any) -> bool:
    """Whether a stock head takes the last place, or the mean of all, pads among them: transformers'
    sequence summaries (XLNet, XLM, Flaubert) other than the first place."""
    summary = any(type(each).__name__.endswith("SequenceSummary") for each in model.modules())
    return summary and getattr(model.config, "summary_type", "first") != "first"


def _limit(limit: Limit, asked: Any) -> Limit:
    if asked is None:
        return limit
    if not is_whole(asked) or asked < 1 or (limit.value is not None and asked > limit.value):
        raise ConversionError(
            f"max_length={asked!r} is not from 1 to {limit.value or 'any number'} "
            f"(limit from {limit.source})."
        )
    return Limit(asked, "max_length")
