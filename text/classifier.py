# SPDX-License-Identifier: Apache-2.0
"""`Classifier`: texts in, labels with scores out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from headswap.heads import ActivationChoice, apply_activation, choose_activation
from headswap.registry.errors import ConversionError
from headswap.text.encode import Encoded, Encoder, Text, collate
from headswap.text.lengths import Limit, usable_length

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a text was classified as. `scores` keeps the order of the label columns."""

    label: str
    score: float
    scores: dict[str, float]
    logits: list[float]
    tokens: int
    truncated: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


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
        progress: Progress | None = None,
    ) -> list[Answer]:
        """An answer for each text (or pair of texts), in the order given.

        `activation` applies to this call alone. `progress(done, total)` is called after each batch.
        Raises `InputError` for a text without tokens, or too long where cutting is off.
        """
        given = [texts] if isinstance(texts, str) else list(texts)
        choice = self.activation if activation is None else self._choose(activation)
        rows = self.encode(given)
        logits = self._logits(rows, progress)
        scores = apply_activation(logits, choice)
        return [
            self._answer(row, one, raw)
            for row, one, raw in zip(rows, scores.tolist(), logits.tolist(), strict=True)
        ]

    def encode(self, texts: Sequence[Text]) -> list[Encoded]:
        """The ids that each text (or pair) is given to the model as."""
        return self._encoder.encode(texts)

    def _choose(self, activation: str | None) -> ActivationChoice:
        return choose_activation(self.model.config, num_labels=len(self.labels), call=activation)

    def _logits(self, rows: Sequence[Encoded], progress: Progress | None) -> Tensor:
        """fp32 logits `[texts, labels]` in the order of `rows`; like lengths share a batch."""
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i].ids))
        found = torch.empty(len(rows), len(self.labels))
        with evaluating(self.model), torch.inference_mode():
            for start in range(0, len(order), self.batch_size):
                chosen = order[start : start + self.batch_size]
                batch = collate([rows[i] for i in chosen], self._pad_id)
                batch = {name: value.to(self.model.device) for name, value in batch.items()}
                found[chosen] = self.model(**batch).logits.float().cpu()
                if progress is not None:
                    progress(start + len(chosen), len(rows))
        return found

    def _answer(self, row: Encoded, scores: list[float], logits: list[float]) -> Answer:
        best = max(range(len(scores)), key=scores.__getitem__)
        named = dict(zip(self.labels, scores, strict=True))
        return Answer(self.labels[best], scores[best], named, logits, len(row.ids), row.truncated)


def _open(source: Any, tokenizer: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    if not isinstance(source, (str, PathLike)):
        if tokenizer is None:
            raise ConversionError("A loaded model needs tokenizer=; a path brings its own.")
        if options:
            raise ConversionError(
                f"{', '.join(options)}: options of loading, and the model is loaded already."
            )
        _require_classifier(source)
        return source, tokenizer
    from headswap.convert.checkpoint import open_checkpoint
    from headswap.convert.decide import Options
    from headswap.convert.job import decide

    checkpoint = open_checkpoint(source, trust_remote_code=options.get("trust_remote_code", False))
    tokenizer = tokenizer if tokenizer is not None else checkpoint.tokenizer()
    dtype, device = options.pop("dtype", None), options.pop("device", None)
    model = decide(checkpoint, Options(tokenizer=tokenizer, **options)).load(dtype, device)
    _require_classifier(model)
    return model, tokenizer


def _require_classifier(model: Any) -> None:
    """Refuse a model that gives no label for a text."""
    conversion = getattr(model, "conversion", None)
    task = conversion.task if conversion is not None else type(model).__name__
    if task not in ("classify", "reward") and not str(task).endswith("SequenceClassification"):
        raise ConversionError(
            f"{type(model).__name__} gives no label for a text (it is for {task}); a Classifier "
            "needs a sequence classifier, as headswap.load(path, task='classify') returns."
        )


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


def label_names(config: Any) -> tuple[str, ...]:
    """Label names by column: keys of id2label as numbers, whatever their order in the file."""
    return tuple(str(config.id2label[key]) for key in sorted(config.id2label, key=int))


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


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """The model in eval mode for a while."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:  # one by one: a part that was frozen in eval mode stays so
            module.training = True
