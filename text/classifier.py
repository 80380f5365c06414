# SPDX-License-Identifier: Apache-2.0
"""`Classifier`: texts in, labels with scores out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from headswap.heads import ActivationChoice, apply_activation, choose_activation
from headswap.registry.errors import ConversionError
from headswap.text.answers import Answer, best, check_columns, check_top_k, label_names
from headswap.text.encode import Encoded, Encoder, Text, collate
from headswap.text.lengths import Limit, usable_length
from headswap.text.running import device_of, evaluating, require_classifier, takes_segments

Progress = Callable[[int, int], None]


class Classifier:
    """Classifies texts with a checkpoint or a model.

    `source` is what `headswap.load` takes (with `load_options`), or a loaded classifier, which
    needs `tokenizer`. `template` (default: the one stored with the model) stands around each text.
    `activation` is "softmax", "sigmoid" or "identity"; what decided is in `.activation`. A text
    longer than the limit (`.limit`) is cut and marked, or refused with `truncation=False`.
    """

    def __init__(
        self,
        source: str | PathLike[str] | Any,
        *,
        tokenizer: Any = None,
        template: str | None = None,
        activation: str | None = None,
        batch_size: int = 32,
        max_length: int | None = None,
        truncation: bool = True,
        **load_options: Any,
    ) -> None:
        self.model, tokenizer = _open(source, tokenizer, load_options)
        self.labels = label_names(self.model.config)
        self.activation = self._choose(activation)
        if batch_size < 1:
            raise ConversionError(f"batch_size={batch_size}; it must be 1 or more.")
        self.batch_size, self._pad_id = _padding(self.model, tokenizer, batch_size)
        self._segments = takes_segments(self.model)
        self.limit = _limit(self.model, tokenizer, max_length)
        stored = getattr(self.model.config, "headswap", None) or {}
        self.template = template if template is not None else stored.get("template")
        self._encoder = Encoder(
            tokenizer, self.limit, template=self.template, truncation=truncation
        )

    def classify(
        self,
        texts: Text | Sequence[Text],
        *,
        activation: str | None = None,
        top_k: int | None = None,
        progress: Progress | None = None,
    ) -> list[Answer]:
        """An answer for each text (or pair of texts), in the order given.

        `activation` applies to this call alone; `top_k` keeps that many of the best `scores`.
        `progress(done, total)` is called after each batch. Raises `InputError` for a text without
        tokens, or too long where cutting is off, and `LabelError` for logits of another width than
        the config's labels.
        """
        check_top_k(top_k)
        given = [texts] if isinstance(texts, str) else list(texts)
        choice = self.activation if activation is None else self._choose(activation)
        rows = self.encode(given)
        logits = self.run(rows, self._logits, len(self.labels), progress)
        scores = apply_activation(logits, choice)
        return [
            self._answer(row, one, raw, top_k)
            for row, one, raw in zip(rows, scores.tolist(), logits.tolist(), strict=True)
        ]

    def encode(self, texts: Sequence[Text]) -> list[Encoded]:
        """The ids that each text (or pair) is given to the model as."""
        return self._encoder.encode(texts)

    def _choose(self, activation: str | None) -> ActivationChoice:
        return choose_activation(self.model.config, num_labels=len(self.labels), call=activation)

    def run(
        self,
        rows: Sequence[Encoded],
        function: Callable[[dict[str, Tensor]], Tensor],
        width: int,
        progress: Progress | None = None,
    ) -> Tensor:
        """What `function` gives for the model's inputs (`[batch, width]` each), as fp32
        `[texts, width]` on the CPU, in the order of `rows`; like lengths share a batch."""
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i].ids))
        found = torch.empty(len(rows), width)
        device = device_of(self.model)
        with evaluating(self.model), torch.inference_mode():
            for start in range(0, len(order), self.batch_size):
                chosen = order[start : start + self.batch_size]
                batch = collate([rows[i] for i in chosen], self._pad_id)
                if not self._segments:
                    batch.pop("token_type_ids", None)
                batch = {name: value.to(device) for name, value in batch.items()}
                found[chosen] = function(batch).float().cpu()
                if progress is not None:
                    progress(start + len(chosen), len(rows))
        return found

    def _logits(self, batch: dict[str, Tensor]) -> Tensor:
        logits: Tensor = self.model(**batch).logits
        check_columns(logits.shape, len(batch["input_ids"]), self.labels)
        return logits

    def _answer(
        self, row: Encoded, scores: list[float], logits: list[float], top_k: int | None
    ) -> Answer:
        first = max(range(len(scores)), key=scores.__getitem__)
        kept = best(dict(zip(self.labels, scores, strict=True)), top_k)
        return Answer(self.labels[first], scores[first], kept, logits, len(row.ids), row.truncated)


def _open(source: Any, tokenizer: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    if not isinstance(source, (str, PathLike)):
        if tokenizer is None:
            raise ConversionError("A loaded model needs tokenizer=; a path brings its own.")
        if options:
            raise ConversionError(
                f"{', '.join(options)}: options of loading, and the model is loaded already."
            )
        require_classifier(source)
        return source, tokenizer
    from headswap.convert.checkpoint import open_checkpoint
    from headswap.convert.decide import Options
    from headswap.convert.job import decide

    checkpoint = open_checkpoint(source, trust_remote_code=options.get("trust_remote_code", False))
    tokenizer = tokenizer if tokenizer is not None else checkpoint.tokenizer()
    dtype, device = options.pop("dtype", None), options.pop("device", None)
    model = decide(checkpoint, Options(tokenizer=tokenizer, **options)).load(dtype, device)
    require_classifier(model)
    return model, tokenizer


def _padding(model: Any, tokenizer: Any, batch_size: int) -> tuple[int, int]:
    """Texts in a batch, and the id to pad with.

    Our models go by the mask, so any id will do; transformers' own score heads search for their
    config's pad id, and without one they take a text at a time.
    """
    own = hasattr(model, "head_spec")
    pad = tokenizer.pad_token_id if own else model.config.get_text_config().pad_token_id
    if pad is None:
        return (batch_size if own else 1), 0
    return batch_size, int(pad)


def _limit(model: Any, tokenizer: Any, asked: int | None) -> Limit:
    limit = usable_length(model, tokenizer)
    if asked is None:
        return limit
    if asked < 1 or (limit.value is not None and asked > limit.value):
        raise ConversionError(
            f"max_length={asked} is not from 1 to {limit.value or 'any number'} "
            f"(limit from {limit.source})."
        )
    return Limit(asked, "max_length")
