# SPDX-License-Identifier: Apache-2.0
"""What is said of a name that cannot be served."""

from __future__ import annotations

from collections.abc import Sequence

from headswap.registry.errors import (
    ArchitectureError,
    RemovedArchitectureError,
    RenamedArchitectureError,
    UnknownArchitectureError,
)
from headswap.registry.state import Retired
from headswap.registry.suggest import shown

_WIDEST_CAUSE = 200
"""Bytes of a plugin's failure that a message repeats; the warning had all of it."""


def retired(name: str, gone: Retired) -> ArchitectureError:
    """The error for a name that is gone: renamed, or removed."""
    if gone.renamed_to:
        return RenamedArchitectureError(
            f"{name} is called {gone.renamed_to} now and has another config; use a checkpoint "
            f"that names {gone.renamed_to}.",
            architecture=name,
            renamed_to=gone.renamed_to,
        )
    hint = f" To get it back: {gone.install_hint}." if gone.install_hint else ""
    return RemovedArchitectureError(
        f"{name} was removed in {gone.removed_in}.{hint}",
        architecture=name,
        removed_in=gone.removed_in,
        install_hint=gone.install_hint,
    )


def unknown(
    name: str, close: tuple[str, ...], known: int, broken: Sequence[str]
) -> UnknownArchitectureError:
    """The error for a name that nobody knows, with near misses and the plugins that failed."""
    meant = f" Did you mean {' or '.join(close)}?" if close else ""
    cause = broken[0].encode()[:_WIDEST_CAUSE].decode(errors="ignore") if broken else ""
    failed = f" ({len(broken)} failed: {cause})" if broken else ""
    return UnknownArchitectureError(
        f"Unknown architecture {shown(name)}.{meant} {known} are known "
        f"(headswap.registry.global_registry.names()); add one with headswap.register()"
        f" or install its plugin{failed}.",
        architecture=name,
        suggestions=close,
        known=known,
    )
