# SPDX-License-Identifier: Apache-2.0
"""What the registry keeps of an architecture."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

from headswap.registry.errors import AdapterImportError, RegistrationError

Task = Literal["generate", "classify", "reward", "embed", "token-classify"]
TASKS: tuple[Task, ...] = ("generate", "classify", "reward", "embed", "token-classify")


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """An architecture name and the class that it stands for.

    `target` is a class, or "package.module:Class" to be imported on use. `task` is what that
    class does by itself; None for a backbone under another head, which can only be converted.
    `head` names the head family that the architecture wants; `owner` says who registered it.
    """

    architecture: str
    target: str | type
    task: Task | None = None
    model_type: str | None = None
    head: str | None = None
    owner: str = ""
    install_hint: str | None = None

    def __post_init__(self) -> None:
        check_name(self.architecture)
        if self.task is not None and self.task not in TASKS:
            raise RegistrationError(f"Unknown task {self.task!r}; known: {', '.join(TASKS)}.")
        check_target(self.target)

    def load(self) -> Any:
        """The class; imported now if it was given as a string.

        Raises `AdapterImportError` with the original error in its text and as its cause.
        """
        if isinstance(self.target, str):
            found = load_target(self.target, self.architecture, self.install_hint)
            if not isinstance(found, type):
                raise _failed(self.architecture, self.target, f"it is {found!r}, not a class",
                              self.install_hint)  # fmt: skip
            return found
        return self.target


def check_name(name: object) -> None:
    """Refuse what can't be the name of a class."""
    if not isinstance(name, str) or not name.isidentifier():
        raise RegistrationError(
            f"{name!r:.100} is not an architecture name; expected a class name such as "
            "'LlamaForCausalLM'."
        )


def check_target(target: object) -> None:
    """Refuse a target that is neither a class nor of the form "package.module:attribute"."""
    if isinstance(target, type):
        return
    if not isinstance(target, str):
        raise RegistrationError(
            f"A target is a class or a string 'package.module:Class'; got {target!r}."
        )
    module, _, attribute = target.partition(":")
    if not (_dotted(module) and _dotted(attribute)):
        raise RegistrationError(
            f"{target!r:.200} is not of the form 'package.module:Class'.", target=target
        )


def _dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def load_target(target: str, name: str, install_hint: str | None = None) -> Any:
    """What "package.module:attribute" points to; `AdapterImportError` for `name` if nothing."""
    module, _, attribute = target.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # a module may raise anything while it is imported
        raise _failed(name, target, f"{type(error).__name__}: {error}", install_hint) from error
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except Exception as error:  # lazy modules import on attribute access
            raise _failed(name, target, f"{type(error).__name__}: {error}",
                          install_hint) from error  # fmt: skip
    return found


def _failed(name: str, target: str, why: str, hint: str | None) -> AdapterImportError:
    remedy = f" To install what is missing: {hint}." if hint else ""
    return AdapterImportError(
        f"{name} is registered as {target}, which can't be imported ({why}).{remedy}",
        architecture=name,
        target=target,
        install_hint=hint,
    )
