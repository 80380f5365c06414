# SPDX-License-Identifier: Apache-2.0
"""Every error that headswap raises on purpose.

A message says what was asked, what was found and what to do next; attributes carry the same for
programs.
"""

from __future__ import annotations

from typing import Any


class HeadswapError(Exception):
    """The root. Keyword arguments become attributes of the error."""

    def __init__(self, message: str, **attributes: Any) -> None:
        super().__init__(message)
        self.__dict__.update(attributes)

    def __reduce__(self) -> Any:
        # Keyword attributes survive the way back from a worker process.
        return _rebuild, (type(self), str(self), dict(self.__dict__))


def _rebuild(cls: type[HeadswapError], message: str, attributes: dict[str, Any]) -> HeadswapError:
    return cls(message, **attributes)


class ArchitectureError(HeadswapError, LookupError):
    """An architecture name that can't be served."""

    architecture: str

    def __str__(self) -> str:
        return str(self.args[0])


class UnknownArchitectureError(ArchitectureError):
    """No entry, rule or table knows the name."""

    suggestions: tuple[str, ...] = ()
    known: int = 0


class AdapterImportError(ArchitectureError, ImportError):
    """The name is known, but what it points to can't be imported; the cause is chained."""

    target: str
    install_hint: str | None = None


class RemovedArchitectureError(ArchitectureError):
    """The installed transformers no longer has the architecture."""

    removed_in: str | None = None
    install_hint: str | None = None


class RenamedArchitectureError(ArchitectureError):
    """The architecture has another name now, and its config with it."""

    renamed_to: str


class RemoteCodeError(ArchitectureError):
    """The architecture's code lies in the checkpoint, and running it was not allowed."""

    auto_map: str


class TaskError(ArchitectureError):
    """The architecture is known, but cannot do what was asked."""

    task: str


class DuplicateArchitectureError(HeadswapError, ValueError):
    """A name is taken; `clashes` lists (name, owner, new owner)."""

    clashes: tuple[tuple[str, str, str], ...] = ()


class RegistrationError(HeadswapError, ValueError, TypeError):
    """Something was registered in a form that can't work."""


class ConversionError(HeadswapError, ValueError):
    """A conversion that can't be done as asked."""


class MissingHeadError(ConversionError):
    """The checkpoint lacks the head's `tensors`."""

    tensors: tuple[str, ...] = ()


class LabelError(ConversionError):
    """Labels that contradict each other, the stored head, or the vocabulary."""


class WeightError(ConversionError):
    """Tensors without a place, or places without a tensor."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


class CheckpointError(ConversionError):
    """Files that can't be read or written as a checkpoint."""


class UnsupportedHeadError(ConversionError):
    """A head, pooling or output rule that headswap does not have."""


class InputError(HeadswapError, ValueError):
    """Model inputs that have no right answer; `rows` names the rows."""

    rows: tuple[int, ...] = ()


class PluginWarning(UserWarning):
    """A plugin could not be loaded; the others were."""
