# SPDX-License-Identifier: Apache-2.0
"""The texts. A round has words of its own at the same lengths, so that no cache of an earlier round
can answer, in any peer."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

Text = str | list[str]  # a text, or a query and a passage

LONGEST = 512
MEDIAN, SIGMA = 60, 0.9
PASSAGE = (160, 200)
QUERY = 8
SHORT = 16

TEMPLATE = (
    "<|im_start|>system\nJudge whether the document meets the requirements that follow from the "
    "query and the instruction. Note that the answer can only be yes or no.<|im_end|>\n"
    "<|im_start|>user\nInstruction: Given a question that a user typed into a search engine, find "
    "passages that answer it fully, with facts that can be checked, and say no to passages that "
    "merely share words with it or that answer another question.\nQuery: {query}\n"
    "Document: {document}<|im_end|>\n<|im_start|>assistant\n"
)


@dataclass(frozen=True)
class Words:
    """Words that are one token each wherever they stand, of one model's tokenizer."""

    words: tuple[str, ...]
    tokenizer: Any
    causal: bool

    @classmethod
    def of(cls, tokenizer: Any, causal: bool) -> Words:
        known = tokenizer.get_vocab()
        space = "\u0120" if causal else ""  # how byte-level vocabularies write a leading space
        found = sorted(
            word for word in known
            if word.isascii() and word.isalpha() and word.islower() and 3 <= len(word) <= 9
            and space + word in known
        )  # fmt: skip
        return cls(tuple(found), tokenizer, causal)

    def some(self, count: int, draw: random.Random) -> str:
        return " ".join(draw.choices(self.words, k=count))

    def text(self, length: int, draw: random.Random) -> Text:
        """A text of `length` tokens; for encoders a pair, all that cross-encoders take."""
        if self.causal:
            return self.some(length, draw)
        return [self.some(QUERY, draw), self.some(max(length - QUERY - 3, 1), draw)]

    def tokens(self, texts: list[Text]) -> int:
        """How many real tokens a model sees of `texts`."""
        return sum(
            len(self.tokenizer(*([t] if isinstance(t, str) else t))["input_ids"]) for t in texts
        )


def skewed(words: Words, count: int, round_: int) -> list[Text]:
    """Log-normal lengths, median about 60 tokens, at most 512."""
    lengths = random.Random(1)
    draw = random.Random(f"skewed {round_}")
    return [
        words.text(min(LONGEST, max(SHORT, round(MEDIAN * lengths.lognormvariate(0, SIGMA)))), draw)
        for _ in range(count)
    ]


def rerank(words: Words, count: int, round_: int) -> list[Text]:
    """One query and passages of about 180 tokens; in a template for causal models."""
    lengths = random.Random(2)
    draw = random.Random(f"rerank {round_}")
    query = words.some(QUERY, draw)
    passages = [words.some(lengths.randint(*PASSAGE), draw) for _ in range(count)]
    if words.causal:
        return [TEMPLATE.format(query=query, document=each) for each in passages]
    return [[query, each] for each in passages]


def short(words: Words, count: int, round_: int) -> list[Text]:
    """Texts of 16 tokens."""
    draw = random.Random(f"short {round_}")
    return [words.text(SHORT, draw) for _ in range(count)]


SETS = {"skewed": skewed, "rerank": rerank}
