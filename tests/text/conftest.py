# SPDX-License-Identifier: Apache-2.0
"""Tokenizers made by hand, one for each way of marking texts."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

WORDS = [f"w{i}" for i in range(60)]
CHAT = ["<|im_start|>", "<|im_end|>"]
CORPUS = [
    "prefix suffix fixed prefixed",
    "user\nassistant\n\nyes no",
    "the quick brown fox {x}",
] * 4

# Marks in the order of their ids; the form of one text and of two; the tokenizer's names for them.
FAMILIES: dict[str, tuple[list[str], str, str, dict[str, str]]] = {
    "bert": (
        ["[PAD]", "[UNK]", "[CLS]", "[SEP]"],
        "[CLS] $A [SEP]",
        "[CLS] $A [SEP] $B:1 [SEP]:1",
        {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"},
    ),
    "xlm-roberta": (
        ["<s>", "<pad>", "</s>", "<unk>"],
        "<s> $A </s>",
        "<s> $A </s> </s> $B </s>",
        {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>",
         "cls_token": "<s>", "sep_token": "</s>"},
    ),
    "chat": (
        ["<s>", "<pad>", "</s>", "<unk>"],
        "<s> $A",
        "<s> $A <s>:1 $B:1",
        {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"},
    ),
    "ends": (
        ["<pad>", "</s>", "<unk>"],
        "$A </s>",
        "$A $B:1 </s>:1",
        {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"},
    ),
    "gpt2": (["</s>"], "", "", {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>"}),
}  # fmt: skip


def _wrapped(inner: Tokenizer, family: str, chat: bool, more: dict[str, Any]) -> Any:
    marks, single, pair, names = FAMILIES[family]
    if single:
        used = [mark for mark in marks if mark in single.split()]
        inner.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=[(m, inner.token_to_id(m)) for m in used]
        )
    inputs = ["input_ids", "attention_mask"]
    if family == "bert":
        inputs.insert(1, "token_type_ids")
    if chat:
        more = {"additional_special_tokens": CHAT, **more}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, model_input_names=inputs, **{**names, **more}
    )


def _words(family: str, *, chat: bool = False, **more: Any) -> Any:
    marks, _, _, names = FAMILIES[family]
    known = {word: i for i, word in enumerate([*marks, *WORDS])}
    inner = Tokenizer(models.WordLevel(known, unk_token=names["unk_token"]))
    inner.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    return _wrapped(inner, family, chat, more)


def _bytes(family: str, *, chat: bool = False, **more: Any) -> Any:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=FAMILIES[family][0],
    )
    inner.train_from_iterator(CORPUS, trainer)
    return _wrapped(inner, family, chat, more)


@pytest.fixture(scope="session")
def words() -> Callable[..., Any]:
    """`words(family)`: a word-level tokenizer over w0..w59 whose ids fit the tiny models."""
    return _words


@pytest.fixture(scope="session")
def byte_pairs() -> Callable[..., Any]:
    """`byte_pairs(family)`: a byte-level BPE tokenizer, so any string has ids; below 330 ids."""
    return _bytes


@pytest.fixture(scope="session")
def sentence() -> Callable[[int, int], str]:
    """`sentence(n, seed)`: n words that the word-level tokenizers know."""
    return lambda n, seed=0: " ".join(random.Random(seed).choices(WORDS, k=n))


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[tuple[Any, ...]]]:
    """`spied(model)`: a list that gets (ids, segments or None) of each row that `model` is given
    from then on, without its pads."""
    # Rows that are run to learn whether pads matter would be seen too.
    monkeypatch.setattr("headswap.text.batches.pads_are_free", lambda model, pad: True)

    def start(model: Any) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = []

        forward = model.forward

        @functools.wraps(forward)  # not a hook: sentence-transformers calls forward itself
        def looking(*args: Any, **given: Any) -> Any:
            ids = given["input_ids"] if "input_ids" in given else args[0]
            mask, types = given.get("attention_mask"), given.get("token_type_ids")
            for number, row in enumerate(ids):
                real = mask[number].bool() if mask is not None else row >= 0
                segments = None if types is None else tuple(types[number][real].tolist())
                rows.append((tuple(row[real].tolist()), segments))
            return forward(*args, **given)

        model.forward = looking
        return rows

    return start
