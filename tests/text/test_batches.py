# SPDX-License-Identifier: Apache-2.0
"""A text's numbers are its own, whatever runs beside it or ran before it, on a model's forward."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers
from tiny_models import tiny, word_tokenizer

import headswap
from headswap.text import Classifier
from headswap.text.batches import Batches

SEQ = "AutoModelForSequenceClassification"
LENGTHS = (60, 3, 40, 9, 1, 33, 9, 50)
IDS = [[5 + (7 * i + j) % 50 for j in range(n)] for i, n in enumerate(LENGTHS)]
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 2.0,
        "original_max_position_embeddings": 32}  # fmt: skip


def rope(kind: dict[str, Any]) -> dict[str, Any]:
    name = "rope_parameters" if transformers.__version__ >= "5" else "rope_scaling"
    return {name: {**kind, **({"rope_theta": 1e4} if name == "rope_parameters" else {})},
            **({} if kind is DYNAMIC else {"original_max_position_embeddings": 32}),
            "max_position_embeddings": 32 if kind is DYNAMIC else 64}  # fmt: skip


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("llama", rope(DYNAMIC)),
    "longrope": ("llama", rope(LONG)),
    "mobilebert": ("mobilebert", {}),
    "convbert": ("convbert", {}),
    "bert": ("bert", {}),
    "llama": ("llama", {}),
}


def made(name: str) -> Any:
    kind, more = MODELS[name]
    return tiny(kind, SEQ, num_labels=3, **more)


def logits(model: Any, rows: Sequence[list[int]], size: int = 4) -> torch.Tensor:
    classifier = Classifier(model, tokenizer=word_tokenizer(), batch_size=size)
    return torch.tensor([answer.logits for answer in classifier.classify(list(rows))])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [1, 4])
def test_a_texts_numbers_are_those_of_a_fresh_model_alone(name: str, size: int) -> None:
    wanted = []
    for row in IDS:
        with torch.no_grad():
            ids = torch.tensor([row])
            wanted.append(made(name).eval()(input_ids=ids, attention_mask=ids != -1).logits[0])
    model = made(name)
    found = logits(model, IDS, size)
    torch.testing.assert_close(found, torch.stack(wanted), atol=1e-5, rtol=0)
    again = logits(model, IDS[::-1], size)
    torch.testing.assert_close(again, found.flip(0), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_threads_on_one_model_do_not_turn_each_others_texts(name: str) -> None:
    model = made(name)
    classifiers = [Classifier(model, tokenizer=word_tokenizer(), batch_size=1) for _ in IDS]
    wanted = [c.classify([row])[0].logits for c, row in zip(classifiers, IDS, strict=True)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            found = list(pool.map(lambda pair: pair[0].classify([pair[1]])[0].logits,
                                  zip(classifiers, IDS, strict=True)))  # fmt: skip
            for one, other in zip(found, wanted, strict=True):
                assert one == pytest.approx(other, abs=1e-5)


def test_rows_of_unlike_lengths_share_a_batch_only_where_pads_do_nothing() -> None:
    free = list(Batches(made("bert"), 3, 1).of([4, 9, 4, 2]))
    assert free == [[1, 0, 2], [3]]
    assert list(Batches(made("convbert"), 3, 1).of([4, 9, 4, 2])) == [[1], [0, 2], [3]]
    assert list(Batches(made("dynamic"), 3, 1).of([40, 9, 33, 40])) == [[0, 3], [2], [1]]
    assert list(Batches(made("longrope"), 3, 1).of([40, 9, 33, 8])) == [[0, 2], [1, 3]]
    assert list(Batches(made("bert"), 3, 1).of([])) == []
    with pytest.raises(headswap.ConversionError):
        Classifier(made("bert"), tokenizer=word_tokenizer(), batch_size=0)
