# SPDX-License-Identifier: Apache-2.0
"""`Classifier`: texts in, labels with scores out."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

from headswap.heads import ActivationChoice, apply_activation, choose_activation
from headswap.text.answers import Answer, best, check_top_k, label_names
from headswap.text.encode import Encoded, Encoder, Text
from headswap.text.runner import Progress, Runner
from headswap.text.source import open_source


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
        opened = open_source(source, tokenizer, load_options, "classify")
        self.model, tokenizer = opened.model, opened.tokenizer
        self.labels = label_names(self.model.config)
        self.activation = self._choose(activation)
        self.runner = Runner(opened, batch_size=batch_size, max_length=max_length)
        self.batch_size, self.limit = self.runner.batch_size, self.runner.limit
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
        logits = self.runner.logits(rows, self.labels, progress)
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

    def _answer(
        self, row: Encoded, scores: list[float], logits: list[float], top_k: int | None
    ) -> Answer:
        first = max(range(len(scores)), key=scores.__getitem__)
        kept = best(dict(zip(self.labels, scores, strict=True)), top_k)
        return Answer(self.labels[first], scores[first], kept, logits, len(row.ids), row.truncated)
