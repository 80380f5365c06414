# SPDX-License-Identifier: Apache-2.0
"""The head table: one row a family. Data only; the order of a row's layers is the formula.

Each row was compared with transformers' own classes (see `tests/convert/test_parity.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from headswap.heads.spec import (
    BASE,
    HEAD_DROPOUT,
    Activation,
    Dense,
    Dropout,
    Field,
    HeadFamily,
)
from headswap.registry import AdapterRegistry, Task, global_registry
from headswap.registry.catalog import HEADS
from headswap.registry.errors import UnsupportedHeadError

_DROPOUT = Dropout(Field(HEAD_DROPOUT, 0.0))

SCORE = HeadFamily(
    "score",
    "last",
    (Dense("score", "labels", bias=False),),
    # These repeat transformers' generic class instead of inheriting it; `native_family` knows
    # the ones that inherit.
    frozenset({"biogpt", "bloom", "falcon", "gemma3", "gpt-sw3", "gpt2", "gpt_bigcode",
               "gpt_neo", "gpt_neox", "gptj", "mpt", "openai-gpt", "opt", "zamba", "zamba2"}),
)  # fmt: skip
"""GPT style: one linear without bias on the last real token."""

CTRL = HeadFamily("ctrl", "last", (Dense("classifier", "labels", bias=False),), frozenset({"ctrl"}))
"""The score head under another name."""

BERT = HeadFamily(
    "bert",
    "first",
    (
        Dense(f"{BASE}.pooler.dense"),
        Activation("tanh"),
        _DROPOUT,
        Dense("classifier", "labels"),
    ),
    frozenset({"bert", "ernie", "layoutlm", "luke", "markuplm", "megatron-bert", "nezha",
               "rembert", "roc_bert", "tapas"}),
)  # fmt: skip
"""BERT style: the backbone's pooler (dense, tanh) on the first token, then a linear."""

ROBERTA = HeadFamily(
    "roberta",
    "first",
    (
        _DROPOUT,
        Dense("classifier.dense"),
        Activation("tanh"),
        _DROPOUT,
        Dense("classifier.out_proj", "labels"),
    ),
    frozenset({"camembert", "data2vec-text", "esm", "ibert", "roberta", "roberta-prelayernorm",
               "xlm-roberta", "xlm-roberta-xl", "xmod"}),
)  # fmt: skip
"""RoBERTa style: dense, tanh and a projection in the head itself, on the first token."""

TOKEN_SCORE = HeadFamily(
    "token-score", "all", (_DROPOUT, Dense("score", "labels")), task="token-classify"
)
"""One linear on every token, as transformers' generic token classifier has it."""

TOKEN_CLASSIFIER = HeadFamily(
    "token-classifier",
    "all",
    (_DROPOUT, Dense("classifier", "labels")),
    frozenset({"albert", "bert", "camembert", "data2vec-text", "deberta", "deberta-v2",
               "distilbert", "ernie", "gpt2", "layoutlm", "megatron-bert", "rembert", "roberta",
               "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"}),
    task="token-classify",
)  # fmt: skip
"""The same under the name that encoders give it."""


def family(name: str, registry: AdapterRegistry = global_registry) -> HeadFamily:
    """The head family called `name`; `UnsupportedHeadError` with the names that exist."""
    found = registry.head_family(name)
    if isinstance(found, HeadFamily):
        return found
    if found is not None:
        raise UnsupportedHeadError(
            f"The head family {name!r} is registered as {found!r}; it must be a HeadFamily.",
            head=name,
        )
    raise UnsupportedHeadError(
        f"Unknown head family {name!r}; known: {', '.join(registry.head_families())}. "
        "Add one with headswap.register_head_family().",
        head=name,
    )


def families(task: Task, registry: AdapterRegistry = global_registry) -> Iterator[HeadFamily]:
    """The rows of the table for `task` (a reward head is a classifier's), our own first.

    One at a time, so that a registered row that can't be imported stops nobody who has another.
    """
    wanted = "classify" if task == "reward" else task
    names = registry.head_families()
    for name in sorted(names, key=lambda n: n not in HEADS):
        row = family(name, registry)
        if row.task == wanted:
            yield row


def native_family(
    model_type: str, cls: type, task: Task, registry: AdapterRegistry = global_registry
) -> HeadFamily:
    """The family of the head that transformers' own class `cls` for `task` has.

    `UnsupportedHeadError` for a class whose formula no row describes: its tensors' names alone
    don't tell the activation, so a guess could be silently wrong.
    """
    for row in families(task, registry):
        if model_type in row.model_types:
            return row
    if is_generic(cls):
        return default_family(task)
    raise UnsupportedHeadError(
        f"{cls.__name__} (model type {model_type!r}) has a head that no row of the head table "
        f"describes; rows: {', '.join(registry.head_families())}. Describe it with "
        "headswap.register_head_family(), or ask for another head with head=.",
        model_type=model_type,
    )


def default_family(task: Task) -> HeadFamily:
    """The head that a conversion gives a class which has none for `task`."""
    return TOKEN_SCORE if task == "token-classify" else SCORE


def is_generic(cls: type) -> bool:
    """Whether `cls` is transformers' generic class for its task with its forward unchanged."""
    from transformers import modeling_layers

    generics = (
        modeling_layers.GenericForSequenceClassification,
        modeling_layers.GenericForTokenClassification,
    )
    forward = getattr(cls, "forward", None)
    return any(issubclass(cls, one) and forward is one.forward for one in generics)
