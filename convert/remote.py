# SPDX-License-Identifier: Apache-2.0
"""Architectures whose code lies in the checkpoint: served with consent only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headswap.convert.checkpoint import Checkpoint
from headswap.convert.conversion import TASK_SUFFIX
from headswap.registry import AdapterEntry, Resolution, Task
from headswap.registry.errors import AdapterImportError, RemoteCodeError
from headswap.registry.rules import DEFAULT_RULES, split

_KEYS: dict[Task, tuple[tuple[str, Task], ...]] = {
    "classify": (
        ("AutoModelForSequenceClassification", "classify"),
        ("AutoModelForCausalLM", "generate"),
    ),
    "reward": (("AutoModelForCausalLM", "generate"),),
    "token-classify": (
        ("AutoModelForTokenClassification", "token-classify"),
        ("AutoModelForCausalLM", "generate"),
    ),
    "embed": (("AutoModel", "embed"), ("AutoModelForCausalLM", "generate")),
}
"""Keys of a config's auto_map that can serve a task, best first, and what their classes do."""


def needs_consent(name: str, auto_map: Mapping[str, Any], architecture: str) -> RemoteCodeError:
    """The error for a checkpoint whose code was not allowed to run."""
    listed = ", ".join(sorted(str(value) for value in auto_map.values()))
    return RemoteCodeError(
        f"{name}: {architecture} is code that lies in the checkpoint ({listed}). Read it, and pass "
        "trust_remote_code=True to run it.",
        architecture=architecture,
        auto_map=listed,
    )


def resolve_remote(checkpoint: Checkpoint, name: str, task: Task, trust: bool) -> Resolution | None:
    """The class of the checkpoint's own code that serves `task`; None if it has no code.

    Raises `RemoteCodeError` without consent.
    """
    auto_map = checkpoint.raw.get("auto_map") or {}
    found = [(key, does) for key, does in _KEYS.get(task, ()) if key in auto_map]
    if not found:
        return None
    if not trust:
        raise needs_consent(checkpoint.name, auto_map, name)
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    key, does = found[0]
    try:
        cls = get_class_from_dynamic_module(auto_map[key], str(checkpoint.folder))
    except Exception as error:  # somebody else's module may raise anything
        raise AdapterImportError(
            f"{name}: {auto_map[key]} in {checkpoint.name} can't be imported "
            f"({type(error).__name__}: {error}).",
            architecture=name,
            target=str(auto_map[key]),
            install_hint=None,
        ) from error
    entry = AdapterEntry(cls.__name__, cls, task=does, owner=checkpoint.name)
    parts = split(cls.__name__, DEFAULT_RULES)
    stem = parts[0] if parts else cls.__name__
    target = cls.__name__ if does == task else stem + TASK_SUFFIX[task]
    return Resolution(name, task, target, entry, "remote code", f"{key} in the checkpoint's code")
