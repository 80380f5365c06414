# SPDX-License-Identifier: Apache-2.0
"""`Reranker`: a query and documents in, a score for each pair out."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

from headswap.convert.conversion import marks
from headswap.registry import global_registry
from headswap.registry.errors import ConversionError, InputError
from headswap.text.answers import Ranked, check_top_n, label_names
from headswap.text.cross_encoder import check_form, check_modules
from headswap.text.cutting import Budgets
from headswap.text.encode import Encoded, Encoder
from headswap.text.families import RerankerFamily, family_of
from headswap.text.given import Truncation, as_list
from headswap.text.notices import notify
from headswap.text.pairs import PairTemplate
from headswap.text.roles import Role
from headswap.text.runner import Progress, Runner
from headswap.text.scoring import CalibrationLike, Scoring
from headswap.text.source import open_source

PairTemplateText = str | Sequence[str]


class Reranker:
    """Scores pairs of a query and a document with a checkpoint or a model.

    `source` is what `headswap.load` takes (with `load_options`), or a loaded classifier, which
    needs `tokenizer`. Of several labels `relevance` names the one that is scored.

    `template`: "auto" (the one stored with the model, else the default of a known family), a string
    with `{query}`, `{document}` and perhaps `{instruction}`, a sequence of such strings that are
    encoded apart, or None for the tokenizer's own form of a pair. What is in force is in
    `.template` and `.template_source`. `instruction` fills its slot where a call gives none.

    `activation` is "sigmoid", "softmax" (of several labels) or "identity"; `calibration` stands
    before it, as in `headswap.text.Classifier`; what decided is in `.activation` and
    `.calibration`. Too long a pair is cut: the document first and then the query in a
    template, the longer first in the tokenizer's own form; `max_query_tokens` and
    `max_document_tokens` (0: no limit) come before that. `truncation` (True,
    "left", "right", False to refuse) as in `headswap.text.Classifier`.
    """

    def __init__(
        self,
        source: str | PathLike[str] | Any,
        *,
        tokenizer: Any = None,
        template: PairTemplateText | None = "auto",
        instruction: str | None = None,
        activation: str | None = None,
        calibration: CalibrationLike | None = None,
        relevance: str | None = None,
        batch_size: int = 32,
        max_length: int | None = None,
        max_query_tokens: int = 0,
        max_document_tokens: int = 0,
        truncation: Truncation = True,
        **load_options: Any,
    ) -> None:
        budgets = Budgets(max_query_tokens, max_document_tokens)
        role: Role = "score" if relevance is None else "classify"
        opened = open_source(source, tokenizer, load_options, role, check_modules)
        self.model, self._tokenizer = opened.model, opened.tokenizer
        self.labels = label_names(self.model.config)
        self._column = _column(self.labels, relevance)
        self._scoring = Scoring.of(self.model.config, len(self.labels), activation, calibration)
        self.activation = self._scoring.activation
        self.calibration = self._scoring.calibration
        self._runner = Runner(opened, batch_size=batch_size, max_length=max_length)
        self.batch_size, self.limit = self._runner.batch_size, self._runner.limit
        self.instruction = instruction
        self._family: RerankerFamily | None = None
        given, self.template_source = self._decide_template(template)
        if given is None and template == "auto" and opened.checkpoint is not None:
            check_form(opened.checkpoint)
        self._options: dict[str, Any] = {"truncation": truncation, "budgets": budgets}
        self._encoder = self._encoder_of(given)
        self._instructed = self._with_instruction()
        self._said_bare = False
        if instruction:
            self._encoder_for(instruction)

    @property
    def template(self) -> tuple[str, ...] | None:
        """The pieces of the template in force; None for the tokenizer's own form of a pair."""
        found = self._encoder_for(self.instruction).template
        return found.strings if isinstance(found, PairTemplate) else None

    def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        activation: str | None = None,
        calibration: CalibrationLike | None = None,
        progress: Progress | None = None,
    ) -> list[float]:
        """A score for each pair, in the order given: one query with each document, or as many
        queries as documents, pair by pair.

        A score depends on its pair alone. `activation="identity"` gives the scores before any
        function, with `calibration={}` the model's raw ones. Raises
        `InputError` for other numbers of queries and documents, for a pair without tokens, or too
        long where cutting is off, and `ConversionError` for an instruction without a place.
        """
        rows = self.encode(query, documents, instruction=instruction)
        return self._scores(rows, self._scoring.for_call(activation, calibration), progress)[0]

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        activation: str | None = None,
        calibration: CalibrationLike | None = None,
        progress: Progress | None = None,
    ) -> list[Ranked]:
        """The documents from the best score to the worst, each with its place in `documents`.

        Of equal scores the higher raw score comes first (a sigmoid in fp32 is 1 above 17), then the
        earlier document. `top_n` keeps that many. Errors as in `score`.
        """
        check_top_n(top_n)
        given = as_list(documents, "documents")
        if not isinstance(query, str):
            raise InputError("rank takes one query; score takes as many as documents.", rows=())
        rows = self.encode(query, given, instruction=instruction)
        scoring = self._scoring.for_call(activation, calibration)
        scores, raw = self._scores(rows, scoring, progress)
        order = sorted(range(len(given)), key=lambda i: (-scores[i], -raw[i], i))[:top_n]
        return [
            Ranked(i, scores[i], raw[i], given[i], len(rows[i].ids), rows[i].truncated)
            for i in order
        ]

    def encode(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
    ) -> list[Encoded]:
        """The ids that each pair is given to the model as."""
        chosen = self.instruction if instruction is None else instruction
        encoder = self._encoder_for(chosen)
        default = self._family.instruction if self._family else ""
        found = encoder.encode(paired(query, documents), chosen or default)
        if found and self.template_source == "none" and not self._said_bare:
            self._said_bare = True
            notify(
                f"{type(self.model).__name__} is made from a language model and has no template: "
                "pairs are scored in the tokenizer's bare form, and a model that was trained on a "
                "form of its own ranks almost at random without it. Give template=."
            )
        return found

    # -- parts ------------------------------------------------------------------------------------

    def _decide_template(
        self, asked: PairTemplateText | None
    ) -> tuple[PairTemplateText | None, str]:
        config = self.model.config
        if asked is not None and asked != "auto":
            return asked, "template="
        stored = marks(config).get("template") if asked == "auto" else None
        if stored is not None:
            return stored, "stored with the model"
        family = family_of(config.get_text_config().model_type, self.labels)
        if asked == "auto" and family is not None:
            self._family = family
            return family.pieces, family.name
        causal = global_registry.is_causal(config.model_type)
        return None, "none" if causal else "the tokenizer's pair scheme"

    def _encoder_of(self, template: PairTemplateText | None) -> Encoder:
        made = None if template is None else PairTemplate.compile(template, self._tokenizer)
        return Encoder(self._tokenizer, self.limit, template=made, **self._options)

    def _with_instruction(self) -> Encoder | None:
        """The encoder for calls with an instruction; None where there is no place for one."""
        if self._family is not None and self._family.instructed not in (None, self._family.pieces):
            return self._encoder_of(self._family.instructed)
        template = self._encoder.template
        takes = isinstance(template, PairTemplate) and template.takes_instruction
        return self._encoder if takes else None

    def _encoder_for(self, instruction: str | None) -> Encoder:
        if not instruction:
            self._require_instruction()
            return self._encoder
        if self._instructed is None:
            raise ConversionError(
                f"An instruction was given, but the form of a pair ({self.template_source}) has no "
                "place for it; give a template with {instruction}."
            )
        return self._instructed

    def _require_instruction(self) -> None:
        takes = self._instructed is self._encoder
        if takes and not (self._family and self._family.instruction):
            raise ConversionError("The template has {instruction}, and no instruction was given.")

    def _scores(
        self, rows: Sequence[Encoded], scoring: Scoring, progress: Progress | None
    ) -> tuple[list[float], list[float]]:
        """Scores and raw scores of `rows`. Equal rows are run once, so their scores are equal."""
        places: dict[tuple[int, ...], int] = {}
        index = [places.setdefault((*row.ids, *(row.types or ())), len(places)) for row in rows]
        distinct = [rows[index.index(i)] for i in range(len(places))]
        if not distinct:
            return [], []
        self._runner.check_ids(rows)  # numbered as the pairs are, before equal ones are joined
        logits = self._runner.logits(distinct, self.labels, progress)[index]
        scores = scoring.scores(logits)
        return scores[:, self._column].tolist(), logits[:, self._column].tolist()


def paired(query: str | Sequence[str], documents: str | Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of one query with each document, or of as many queries as documents.

    Raises `InputError` for other numbers, and for what is not a string.
    """
    seconds = as_list(documents, "documents")
    firsts = as_list(query, "query")
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(firsts) != len(seconds):
        raise InputError(
            f"{len(firsts)} queries and {len(seconds)} documents; give one query, or as many as "
            "documents.",
            rows=(),
        )
    pairs = list(zip(firsts, seconds, strict=True))
    wrong = tuple(i for i, pair in enumerate(pairs) if not all(isinstance(t, str) for t in pair))
    if wrong:
        raise InputError(f"Queries and documents must be strings; see pair {wrong[0]}.", rows=wrong)
    return pairs


def _column(labels: Sequence[str], relevance: str | None) -> int:
    """The scored column: the only one, or the one that `relevance` names."""
    if relevance is None and len(labels) == 1:
        return 0
    if relevance not in labels:
        asked = "no relevance= was given" if relevance is None else f"relevance={relevance!r}"
        raise ConversionError(
            f"The model has {len(labels)} labels ({', '.join(labels[:5])}) and {asked}; name the "
            "label that means relevant.",
            labels=tuple(labels),
        )
    return labels.index(relevance)
