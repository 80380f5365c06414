# SPDX-License-Identifier: Apache-2.0
"""The head table: one row a family. Data only; the order of a row's layers is the formula.

Each row was compared with transformers' own classes (see `tests/convert/test_parity.py`).
"""

from __future__ import annotations

from typing import Any

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

BUILTIN: tuple[HeadFamily, ...] = (
    BERT,
    CTRL,
    ROBERTA,
    SCORE,
    TOKEN_CLASSIFIER,
    TOKEN_SCORE,
)


def family(name: str, registry: AdapterRegistry = global_registry) -> HeadFamily:
    """The head family called `name`: a registered one, else a built-in one.

    Raises `UnsupportedHeadError` with the names that exist.
    """
    for row in BUILTIN:
        if row.name == name:
            return row
    found = registry.head_family(name)
    if isinstance(found, HeadFamily):
        return found
    known = sorted({row.name for row in BUILTIN} | set(registry.head_families()))
    raise UnsupportedHeadError(
        f"Unknown head family {name!r}; known: {', '.join(known)}. "
        "Add one with headswap.register_head_family().",
        head=name,
    )


def native_family(
    model_type: str, cls: type, task: Task, registry: AdapterRegistry = global_registry
) -> HeadFamily:
    """The family of the head that transformers' own class `cls` for `task` has.

    `UnsupportedHeadError` for a class whose formula no row describes: its tensors' names alone
    don't tell the activation, so a guess could be silently wrong.
    """
    task = "classify" if task == "reward" else task
    rows = [row for row in (*BUILTIN, *_registered(registry)) if row.task == task]
    for row in rows:
        if model_type in row.model_types:
            return row
    if is_generic(cls):
        return TOKEN_SCORE if task == "token-classify" else SCORE
    raise UnsupportedHeadError(
        f"{cls.__name__} (model type {model_type!r}) has a head that no row of the head table "
        f"describes; rows: {', '.join(sorted(row.name for row in rows))}. Describe it with "
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


def _registered(registry: AdapterRegistry) -> list[HeadFamily]:
    found: list[Any] = [registry.head_family(name) for name in registry.head_families()]
    return [row for row in found if isinstance(row, HeadFamily)]
