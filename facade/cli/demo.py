# SPDX-License-Identifier: Apache-2.0
"""`headswap demo`: two real checkpoints become sentiment classifiers and judge real sentences.

SmolLM2, a causal model, classifies by two label tokens with no training; MiniLM, an encoder
without a head, gets a BERT-style head and is fine-tuned here. Each is compared with its own class.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import torch
import transformers

import headswap
from headswap.cli.cache import cache_folder, cached
from headswap.cli.output import err, print_table, say
from headswap.cli.packages import MINILM, SMOLLM2, locate
from headswap.spyre import Executor, RuleReport
from headswap.text import Answer, Classifier

SHOWN = 16
"""Sentences of the file that are classified; the rest train the encoder."""
LABELS = ("negative", "positive")
TEMPLATE = (
    "<|im_start|>user\nIs the sentiment of this movie review positive or negative?\n"
    "Review:\n{text}<|im_end|>\n<|im_start|>assistant\n"
)
SHAPES = [(1, 64), (1, 128), (1, 256)]
"""Rows and tokens that the demo's graphs are compiled for."""
BOUND = 1e-5
"""Largest difference, relative to 1 + the largest logit, that fp32 rounding explains."""

Sentence = tuple[str, str]


def run(cache: Path | None) -> bool:
    """Print both tables; whether both classifiers agree with their reference classes."""
    gguf, encoder = locate(SMOLLM2), locate(MINILM)
    folder = cache_folder(cache)
    sentences = read_sentences()
    shown, training = sentences[:SHOWN], sentences[SHOWN:]
    return all([_decoder(gguf, folder, shown), _encoder(encoder.parent, folder, shown, training)])


def read_sentences() -> list[Sentence]:
    """(label, sentence) pairs; where they come from stands in the file."""
    text = files("headswap.cli").joinpath("data/movie_reviews.tsv").read_text(encoding="utf-8")
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return [(label, sentence) for label, _, sentence in (line.partition("\t") for line in lines)]


def _key(*parts: str) -> str:
    """A short name for everything that decides a cached result."""
    # The release too: what one of them writes, another may read otherwise.
    every = (transformers.__version__, *parts)
    return hashlib.sha256("\n".join(every).encode()).hexdigest()[:12]


# -- a causal model, by label tokens --------------------------------------------------------------


def _decoder(gguf: Path, folder: Path, shown: Sequence[Sentence]) -> bool:
    with err.status("reading SmolLM2 (the first time takes about a minute)"):
        plain = plain_smollm2(gguf, folder)
    with err.status("converting SmolLM2"):
        target = cached(
            folder / f"smollm2-sentiment-{_key(SMOLLM2.sha256, TEMPLATE, *LABELS)}",
            lambda to: headswap.convert_checkpoint(
                plain, to, label_tokens=LABELS, template=TEMPLATE
            ),
        )
        classifier = _under_rules(target)
    answers = _judge(classifier, shown, "SmolLM2-135M-Instruct, label tokens, no training")
    gap = _token_logit_gap(plain, classifier, shown, answers)
    return _agree(gap, "the unconverted model's own token logits", answers)


def plain_smollm2(gguf: Path, folder: Path) -> Path:
    """SmolLM2's GGUF file as plain safetensors in the cache `folder`, unpacked the first time."""
    name = f"smollm2-plain-{_key(SMOLLM2.sha256)}"
    return cached(folder / name, lambda to: unpack(gguf, to))


def unpack(gguf: Path, target: Path) -> None:
    """The causal model of a GGUF file as plain safetensors, once."""
    from headswap.convert.checkpoint import open_checkpoint
    from headswap.convert.gguf import save_tokenizer
    from headswap.convert.loading import read_class

    model, _ = read_class(
        transformers.LlamaForCausalLM, str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    )
    model.save_pretrained(target)
    save_tokenizer(open_checkpoint(gguf).tokenizer(), target)


@torch.inference_mode()
def _token_logit_gap(
    plain: Path, classifier: Classifier, shown: Sequence[Sentence], answers: Sequence[Answer]
) -> float:
    """Largest difference between our logits and those that the stock causal class gives the label
    tokens after the same prompts, one by one."""
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(plain)
    tokens = tokenizer.convert_tokens_to_ids(list(LABELS))
    prompts = classifier.encode([sentence for _, sentence in shown])
    gap = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = model(input_ids=torch.tensor([prompt.ids])).logits[0, -1, tokens]
        gap = max(gap, float((logits - torch.tensor(answer.logits)).abs().max()))
    return gap


# -- an encoder, fine-tuned here with a new head --------------------------------------------------


def _encoder(
    source: Path, folder: Path, shown: Sequence[Sentence], training: Sequence[Sentence]
) -> bool:
    with err.status("fine-tuning MiniLM under a BERT-style head (the first time)"):
        target = cached(
            folder / f"minilm-sentiment-{_key(MINILM.sha256, *(text for _, text in training))}",
            lambda to: _train(source, to, training),
        )
        classifier = _under_rules(target)
    title = f"all-MiniLM-L6-v2, BERT-style head, fine-tuned on {len(training)} other sentences"
    answers = _judge(classifier, shown, title)
    gap = _class_gap(target, shown, answers)
    return _agree(gap, "transformers' BertForSequenceClassification", answers)


def _train(source: Path, target: Path, training: Sequence[Sentence]) -> None:
    """Fine-tune the encoder under a new head for two passes over the sentences."""
    torch.manual_seed(0)
    model = headswap.load(source, id2label=list(LABELS), allow_untrained_head=True).train()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    for _ in range(2):
        order = torch.randperm(len(training)).tolist()
        for start in range(0, len(order), 16):
            batch = [training[i] for i in order[start : start + 16]]
            inputs = tokenizer([text for _, text in batch], padding=True, return_tensors="pt")
            labels = torch.tensor([LABELS.index(label) for label, _ in batch])
            optimizer.zero_grad()
            model(**inputs, labels=labels).loss.backward()
            optimizer.step()
    model.eval().save_pretrained(target)
    tokenizer.save_pretrained(target)


@torch.inference_mode()
def _class_gap(target: Path, shown: Sequence[Sentence], answers: Sequence[Answer]) -> float:
    """Largest difference between our logits and the stock class's, a sentence at a time."""
    model = transformers.BertForSequenceClassification.from_pretrained(target).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    gap = 0.0
    for (_, sentence), answer in zip(shown, answers, strict=True):
        logits = model(**tokenizer(sentence, return_tensors="pt")).logits[0]
        gap = max(gap, float((logits - torch.tensor(answer.logits)).abs().max()))
    return gap


# -- both -----------------------------------------------------------------------------------------


def _judge(classifier: Classifier, shown: Sequence[Sentence], title: str) -> list[Answer]:
    """Classify the sentences one by one, as an application would, and print them."""
    rows, answers = [], []
    for truth, sentence in shown:
        start = time.perf_counter()
        (answer,) = classifier.classify(sentence)
        spent = 1000 * (time.perf_counter() - start)
        right = "" if answer.label == truth else f"(is {truth})"
        rows.append((f"{answer.label} {right}".strip(), f"{answer.score:.3f}", f"{spent:.0f} ms",
                     sentence))  # fmt: skip
        answers.append(answer)
    say(f"\n{title}")
    print_table(("label", "score", "time", "sentence"), rows)
    hits = sum(a.label == truth for a, (truth, _) in zip(answers, shown, strict=True))
    say(f"{hits} of {len(shown)} as people labelled them")
    if classifier.runner.executor is not None:
        _say_rules(classifier.runner.executor)
    return answers


def _under_rules(target: Path) -> Classifier:
    """A classifier in compiled rectangles, whose graphs are checked against the card's rules."""
    executor = Executor(headswap.load(target), backend="checked", rules="record", shapes=SHAPES)
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    return Classifier(executor.warmup(), tokenizer=tokenizer, max_length=SHAPES[-1][1])


def _say_rules(executor: Executor) -> None:
    report = executor.rules or RuleReport()
    done = executor.report()
    say(
        f"{done['compiles']} graphs for {', '.join(done['shapes'])}, none compiled after warm-up; "
        f"{done['waste']:.0%} of the computed tokens are padding\nrules of the card: "
        f"{report.summary} (`headswap inspect --device spyre` lists each)"
    )
    first = {finding.rule: finding for finding in reversed(report.findings)}
    for rule, finding in sorted(first.items(), key=lambda item: int(item[0][1:])):
        say(f"  {rule:3} {finding.severity}: {finding.message}, and what is like it")


def _agree(gap: float, reference: str, answers: Sequence[Answer]) -> bool:
    size = max(abs(logit) for answer in answers for logit in answer.logits)
    say(f"largest difference from {reference}: {gap:.1e}, at logits up to {size:.1f}")
    return gap <= BOUND * (1 + size)
