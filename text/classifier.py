# SPDX-License-Identifier: Apache-2.0
"""`Classifier`: texts in, labels with scores out."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

from headswap.convert.conversion import marks
from headswap.registry.errors import ConversionError
from headswap.text.answers import Answer, best, check_top_k, label_names
from headswap.text.cross_encoder import check_settings
from headswap.text.encode import Encoded, Encoder
from headswap.text.forms import PairTemplateText
from headswap.text.given import Text, Truncation, as_list
from headswap.text.pairs import PairTemplate, takes_pairs
from headswap.text.runner import Progress, Runner
from headswap.text.running import is_causal
from headswap.text.scoring import CalibrationLike, Scoring
from headswap.text.source import open_source


class Classifier:
    """Classifies texts with a checkpoint or a model.

    `source` is what `headswap.load` takes (with `load_options`), or a loaded classifier, which
    needs `tokenizer`. `template` stands around each text, or, with `{query}` and `{document}`,
    around each pair: "auto" is the one stored with the model, if any; None is none.
    `activation` is "softmax", "sigmoid" or "identity"; what decided is in `.activation`.
    `calibration` (a `headswap.text.Calibration`, or a mapping with `mean`, `sigma`, `temperature`)
    is applied to the logits before it; what decided is in `.calibration`. A text longer than the
    limit (`.limit`) is cut and marked: with `truncation` True on the tokenizer's own side, else on
    the one that it names ("left", "right"); False refuses it.
    """

    def __init__(
        self,
        source: str | PathLike[str] | Any,
        *,
        tokenizer: Any = None,
        template: PairTemplateText | None = "auto",
        activation: str | None = None,
        calibration: CalibrationLike | None = None,
        batch_size: int = 32,
        max_length: int | None = None,
        truncation: Truncation = True,
        **load_options: Any,
    ) -> None:
        opened = open_source(source, tokenizer, load_options, "classify", check_settings)
        self.model, tokenizer = opened.model, opened.tokenizer
        self.labels = label_names(self.model.config)
        self._scoring = Scoring.of(self.model.config, len(self.labels), activation, calibration)
        self.activation = self._scoring.activation
        self.calibration = self._scoring.calibration
        self.runner = Runner(opened, batch_size=batch_size, max_length=max_length)
        self.batch_size, self.limit = self.runner.batch_size, self.runner.limit
        stored = marks(self.model.config).get("template")
        self.template = stored if template == "auto" else template
        causal = is_causal(self.model.config)
        self._encoder = Encoder(
            tokenizer, self.limit, template=_compiled(self.template, tokenizer, causal),
            truncation=truncation, causal=causal,
        )  # fmt: skip

    def classify(
        self,
        texts: Text | Sequence[Text],
        *,
        activation: str | None = None,
        calibration: CalibrationLike | None = None,
        top_k: int | None = None,
        progress: Progress | None = None,
    ) -> list[Answer]:
        """An answer for each text (or pair of texts, or list of token ids, which is taken as it is
        and never cut), in the order given.

        `activation` and `calibration` apply to this call alone (`{}`: no calibration); an answer's
        `logits` are the model's own whatever they are. `top_k` keeps that many of the best
        `scores`. `progress(done, total)` is called after each batch. Raises `InputError` for a text
        without tokens, or too long where cutting is off, and `LabelError` for logits of another
        width than the config's labels.
        """
        check_top_k(top_k)
        given = as_list(texts)
        scoring = self._scoring.for_call(activation, calibration)
        rows = self.encode(given)
        logits = self.runner.logits(rows, self.labels, progress)
        scores = scoring.scores(logits)
        return [
            self._answer(row, one, raw, top_k)
            for row, one, raw in zip(rows, scores.tolist(), logits.tolist(), strict=True)
        ]

    def encode(self, texts: Sequence[Text]) -> list[Encoded]:
        """The ids that each text (or pair) is given to the model as."""
        return self._encoder.encode(texts)

    def _answer(
        self, row: Encoded, scores: list[float], logits: list[float], top_k: int | None
    ) -> Answer:
        first = max(range(len(scores)), key=scores.__getitem__)
        kept = best(dict(zip(self.labels, scores, strict=True)), top_k)
        return Answer(self.labels[first], scores[first], kept, logits, len(row.ids), row.truncated)


def _compiled(
    template: PairTemplateText | None, tokenizer: Any, causal: bool
) -> str | PairTemplate | None:
    """A template for one text as it is, and one for pairs compiled."""
    if template is None or not takes_pairs(template):
        return "".join(template) if template else None
    made = PairTemplate.compile(template, tokenizer, causal=causal)
    if made.takes_instruction:
        raise ConversionError(
            "The template has {instruction}, and a Classifier takes none; a Reranker does.",
            template=template,
        )
    return made
