# SPDX-License-Identifier: Apache-2.0
"""`Reranker`: a query and documents in, a score for each pair out."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

from headswap.registry.errors import ConversionError, InputError
from headswap.text.answers import Ranked, check_top_n, label_names
from headswap.text.cross_encoder import check_modules
from headswap.text.cutting import Budgets
from headswap.text.encode import Encoded, Encoder
from headswap.text.forms import Chooser, PairEncoder, PairTemplateText
from headswap.text.given import Truncation, as_list
from headswap.text.notices import notify
from headswap.text.pairs import PairTemplate, pieces_of
from headswap.text.roles import Role
from headswap.text.runner import Progress, Runner
from headswap.text.running import is_causal
from headswap.text.scoring import CalibrationLike, Scoring
from headswap.text.source import open_source

SAME = "same"
"""Of a call's `template`: the one that the reranker was made with."""


class Reranker:
    """Scores pairs of a query and a document with a checkpoint or a model.

    `source` is what `headswap.load` takes (with `load_options`), or a loaded classifier, which
    needs `tokenizer`. Of several labels `relevance` names the one that is scored.

    `template`: "auto" (the one stored with the model, else the chat template of a CrossEncoder that
    was saved with one, else a known family's by the label tokens that the checkpoint names), a
    string with `{query}`, `{document}` and perhaps `{instruction}`, a sequence of such strings that
    are encoded apart, "chat" (the tokenizer's chat template, with the roles "query" and
    "document"), a family's name ("Qwen3-Reranker"), or None for the tokenizer's own form of a pair.
    What is in force is in `.template` and `.template_source`; a call may give another.
    `instruction` fills its slot where a call gives none.

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
        self._encoding: dict[str, Any] = {"truncation": truncation, "budgets": budgets}
        self._chooser = Chooser.of(self.model, self.labels, opened)
        self._forms: dict[PairTemplateText | None, PairEncoder] = {}
        self._own = self._form(template)
        self.template_source = self._own.form.source
        self._said_bare = False
        if instruction:
            self._own.encoder(instruction)

    @property
    def template(self) -> tuple[str, ...] | None:
        """The pieces of the template in force; None for the tokenizer's own form of a pair."""
        return self._own.strings(self.instruction)

    def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        template: PairTemplateText | None = SAME,
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
        rows = self.encode(query, documents, instruction=instruction, template=template)
        return self._scores(rows, self._scoring.for_call(activation, calibration), progress)[0]

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        template: PairTemplateText | None = SAME,
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
        rows = self.encode(query, given, instruction=instruction, template=template)
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
        template: PairTemplateText | None = SAME,
    ) -> list[Encoded]:
        """The ids that each pair is given to the model as."""
        chosen = self.instruction if instruction is None else instruction
        own = self._own if template == SAME else self._form(template)
        pairs = own.texts(paired(query, documents))
        found = own.encoder(chosen).encode(pairs, chosen or own.default)
        if found and own.form.source == "none" and not self._said_bare:
            self._said_bare = True
            notify(
                f"{type(self.model).__name__} is made from a language model and has no template: "
                "pairs are scored in the tokenizer's bare form, and a model that was trained on a "
                "form of its own ranks almost at random without it. Give template=." + own.form.hint
            )
        return found

    # -- parts ------------------------------------------------------------------------------------

    def _form(self, template: PairTemplateText | None) -> PairEncoder:
        """The form of a call; those of the last few calls are kept, since making one is slow."""
        bare = template is None or isinstance(template, str)
        key = template if bare else tuple(pieces_of(template))  # type: ignore[arg-type]
        found = self._forms.get(key)
        if found is None:
            found = PairEncoder(
                self._chooser.form(key), self._tokenizer, is_causal(self.model.config),
                self._encoder_of,
            )  # fmt: skip
            self._forms = {**dict([*self._forms.items()][-3:]), key: found}
        return found

    def _encoder_of(self, template: PairTemplate | None, hint: str) -> Encoder:
        return Encoder(self._tokenizer, self.limit, template=template, hint=hint, **self._encoding)

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
