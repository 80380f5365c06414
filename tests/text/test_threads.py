# SPDX-License-Identifier: Apache-2.0
"""Many threads with limits and sides of their own, on one tokenizer and one model."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tiny_models import tiny

import headswap
from headswap.text import Classifier, Embedder, Reranker, RewardModel

SEQ = "AutoModelForSequenceClassification"
THREADS, CALLS = 16, 200
WAYS: list[dict[str, Any]] = [
    {"max_length": length, "truncation": side}
    for length in (6, 7, 9, 12)
    for side in ("left", "right")
]


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads take turns a thousand times as often as usual."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(usual)


def classifiers(words: Any) -> list[Callable[[str], Any]]:
    model, own = tiny("bert", SEQ, num_labels=3, num_hidden_layers=1), words("bert")
    made = [Classifier(model, tokenizer=own, **way, template=template)
            for way, template in zip(WAYS, (None, "w1 {text} w2") * 4, strict=True)]  # fmt: skip
    return [one.classify for one in made]


def rerankers(words: Any) -> list[Callable[[str], Any]]:
    model, own = tiny("bert", SEQ, num_labels=1, num_hidden_layers=1), words("bert")
    templates = (None, "w1 {query} w2 {document}") * 4
    made = [Reranker(model, tokenizer=own, **way, template=template)
            for way, template in zip(WAYS, templates, strict=True)]  # fmt: skip
    return [lambda text, one=one: one.rank("w5 w6", [text, "w7"]) for one in made]  # type: ignore[misc]


def embedders(words: Any) -> list[Callable[[str], Any]]:
    model, own = tiny("bert", "AutoModel", num_hidden_layers=1), words("bert")
    model = headswap.as_embedding_model(model)
    made = [Embedder(model, tokenizer=own, **way) for way in WAYS]
    return [lambda text, one=one: one.embed([text]).tolist() for one in made]  # type: ignore[misc]


def reward_models(words: Any) -> list[Callable[[str], Any]]:
    model, own = tiny("qwen3", SEQ, num_labels=1, num_hidden_layers=1), words("chat", chat=True)
    own.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    made = [RewardModel(model, tokenizer=own, max_length=way["max_length"], truncation="left")
            for way in WAYS]  # fmt: skip
    return [lambda text, one=one: one.reward([{"role": "user", "content": text}])  # type: ignore[misc]
            for one in made]  # fmt: skip


@pytest.mark.usefixtures("eager_threads")
@pytest.mark.parametrize("make", [classifiers, rerankers, embedders, reward_models])
def test_sixteen_threads_with_two_hundred_calls_each_equal_the_serial_answers(
    make: Any, words: Any, sentence: Any
) -> None:
    ways = make(words)
    texts = [sentence(3 + 5 * n % 17, n) for n in range(10)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = [[way(text) for text in texts] for way in ways]
        assert len({str(each) for each in wanted}) > 1
        start = threading.Barrier(THREADS)

        def work(thread: int) -> int:
            start.wait()
            wrong = 0
            for call in range(CALLS):
                way, text = (thread + call) % len(ways), (thread * 3 + call) % len(texts)
                wrong += ways[way](texts[text]) != wanted[way][text]
            return wrong

        with ThreadPoolExecutor(THREADS) as pool:
            assert list(pool.map(work, range(THREADS))) == [0] * THREADS
