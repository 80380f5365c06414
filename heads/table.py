# SPDX-License-Identifier: Apache-2.0
"""Looks a head family up: by name, or as the one that transformers' own class has."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

from headswap.heads.families import SCORE
from headswap.heads.spec import HeadFamily
from headswap.heads.token_families import TOKEN_SCORE
from headswap.registry import AdapterRegistry, Task, global_registry
from headswap.registry.catalog import HEADS
from headswap.registry.errors import UnsupportedHeadError


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
        if not row.model_types.isdisjoint((model_type, f"{model_type}@{release()}")):
            return row
    if is_generic(cls):
        return default_family(task)
    raise UnsupportedHeadError(
        f"{cls.__name__} (model type {model_type!r}) has a head that no row of the head table "
        f"describes; rows: {', '.join(registry.head_families())}. Describe it with "
        "headswap.register_head_family(), or ask for another head with head=.",
        model_type=model_type,
    )


def default_family(
    task: Task, model_type: str | None = None, registry: AdapterRegistry = global_registry
) -> HeadFamily:
    """The head that a conversion gives a class which has none for `task`."""
    if task == "token-classify":
        return TOKEN_SCORE
    return next((r for r in families(task, registry) if model_type in r.causal_types), SCORE)


def release() -> int:
    """The major release of the installed transformers."""
    return int(version("transformers").split(".")[0])


def is_generic(cls: type) -> bool:
    """Whether `cls` is transformers' generic class for its task with its forward unchanged."""
    from transformers import modeling_layers

    generics = (
        modeling_layers.GenericForSequenceClassification,
        modeling_layers.GenericForTokenClassification,
    )
    forward = getattr(cls, "forward", None)
    return any(issubclass(cls, one) and forward is one.forward for one in generics)
