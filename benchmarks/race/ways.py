# SPDX-License-Identifier: Apache-2.0
"""Peers that run in torch: plain transformers, its pipeline, sentence-transformers, headswap.

Each takes texts and gives raw logits in their order; tokenizing is part of the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

Text = str | list[str]
Logits = list[list[float]]
LONGEST = 512


@dataclass(frozen=True)
class Spec:
    """What a peer is asked to load."""

    folder: str
    dtype: str  # "float32" or "bfloat16"
    threads: int
    causal: bool
    longest: int = LONGEST


class Way:
    """A peer. `batches` are the batch sizes that a warm-up chooses from, by speed, for each set."""

    batches: tuple[int, ...] = ()
    batch = 1
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    causal_only = False
    encoders_only = False

    @classmethod
    def unprepared(cls, spec: Spec) -> bool:
        """Whether a first load would convert or compile what later ones find."""
        return False

    def load(self, spec: Spec) -> None:
        raise NotImplementedError

    def logits(self, texts: Sequence[Text]) -> Logits:
        raise NotImplementedError

    def forget(self) -> None:
        """Drop what an earlier call left in a cache, where the peer offers that."""

    def settings(self) -> dict[str, Any]:
        """What the run should say of how the peer was set."""
        return {}


class Batches(Way):
    """Texts tokenized together, sorted by length, in batches; `forward` is the engine's."""

    tokenizer: Any
    longest: int
    returns = "pt"

    def take_tokenizer(self, spec: Spec) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(spec.folder)
        self.tokenizer.padding_side = "right"
        self.longest = spec.longest

    def forward(self, inputs: dict[str, Any]) -> Logits:
        raise NotImplementedError

    def logits(self, texts: Sequence[Text]) -> Logits:
        found: Logits = [[] for _ in texts]
        for index, inputs in self._batches(texts):
            for i, row in zip(index, self.forward(inputs), strict=True):
                found[i] = row
        return found

    def _batches(self, texts: Sequence[Text]) -> Iterator[tuple[list[int], dict[str, Any]]]:
        pairs = [[t] if isinstance(t, str) else t for t in texts]
        columns = [list(column) for column in zip(*pairs, strict=True)]
        rows = self.tokenizer(*columns, truncation=True, max_length=self.longest)
        order = sorted(range(len(texts)), key=lambda i: -len(rows["input_ids"][i]))
        for start in range(0, len(order), self.batch):
            index = order[start : start + self.batch]
            chosen = {name: [values[i] for i in index] for name, values in rows.items()}
            yield index, dict(self.tokenizer.pad(chosen, return_tensors=self.returns))


def load_transformers(spec: Spec) -> Any:
    """transformers' own classifier in eval mode."""
    import torch
    from transformers import AutoModelForSequenceClassification

    torch.set_num_threads(spec.threads)
    return AutoModelForSequenceClassification.from_pretrained(
        spec.folder, dtype=getattr(torch, spec.dtype)
    ).eval()


class One(Batches):
    """Plain transformers, a text at a time."""

    model: Any

    def load(self, spec: Spec) -> None:
        self.take_tokenizer(spec)
        self.model = load_transformers(spec)

    def forward(self, inputs: dict[str, Any]) -> Logits:
        import torch

        with torch.inference_mode():
            found: Logits = self.model(**inputs).logits.float().tolist()
        return found


class Sorted(One):
    """Plain transformers in batches of like lengths."""

    batches = (8, 16)


class Pipeline(Way):
    """transformers' pipeline as it comes: batches of one."""

    def load(self, spec: Spec) -> None:
        from transformers import AutoTokenizer, pipeline

        tokenizer = AutoTokenizer.from_pretrained(spec.folder)
        self._run = pipeline(
            "text-classification", model=load_transformers(spec), tokenizer=tokenizer,
            function_to_apply="none", top_k=None, device="cpu",
        )  # fmt: skip
        self._longest = spec.longest

    def logits(self, texts: Sequence[Text]) -> Logits:
        given = [t if isinstance(t, str) else {"text": t[0], "text_pair": t[1]} for t in texts]
        found = self._run(given, truncation=True, max_length=self._longest)
        return [[row["score"] for row in sorted(rows, key=lambda r: r["label"])] for rows in found]


class CrossEncoder(Way):
    """sentence-transformers' CrossEncoder. It takes pairs only, and writes a form of its own around
    those of causal models, so that the ids would be others."""

    batches = (1, 16)
    encoders_only = True

    def load(self, spec: Spec) -> None:
        import torch
        from sentence_transformers import CrossEncoder as Theirs

        torch.set_num_threads(spec.threads)
        self._model = Theirs(
            spec.folder, device="cpu", max_length=spec.longest, activation_fn=torch.nn.Identity(),
            model_kwargs={"dtype": getattr(torch, spec.dtype)},
        )  # fmt: skip

    def logits(self, texts: Sequence[Text]) -> Logits:
        found = self._model.predict([tuple(pair) for pair in texts], batch_size=self.batch,
                                    show_progress_bar=False)  # fmt: skip
        return [[float(value)] for value in found]


class Headswap(Way):
    """Ours: an executor under a `Classifier`."""

    shares = False

    def load(self, spec: Spec) -> None:
        import torch

        torch.set_num_threads(spec.threads)
        from transformers import AutoTokenizer

        import headswap
        from headswap.spyre import Executor
        from headswap.text import Classifier

        model = headswap.load(spec.folder, dtype=getattr(torch, spec.dtype))
        self._executor = Executor(model, share_prefixes=self.shares).warmup()
        self._classifier = Classifier(
            self._executor, tokenizer=AutoTokenizer.from_pretrained(spec.folder),
            max_length=spec.longest,
        )  # fmt: skip

    def logits(self, texts: Sequence[Text]) -> Logits:
        given = [t if isinstance(t, str) else tuple(t) for t in texts]
        return [list(answer.logits) for answer in self._classifier.classify(given)]

    def settings(self) -> dict[str, Any]:
        said: dict[str, Any] = {}
        with suppress(Exception):  # a report may hold what JSON can't say; it is a comment only
            report = self._executor.report()
            said = {key: report[key] for key in ("attention", "shares_prefixes") if key in report}
        return said


class HeadswapShared(Headswap):
    """Ours over the paged cache: beginnings that texts share are computed once."""

    shares = True
    causal_only = True
