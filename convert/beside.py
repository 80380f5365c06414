# SPDX-License-Identifier: Apache-2.0
"""A folder that appears complete or not at all: written beside its target and renamed into place.

The folder is locked while it is written. The system lets go of the lock when a process ends,
however it ends, so what a killed run left behind is known by its free lock, and the next run into
the same target removes it.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from headswap.registry.errors import CheckpointError

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: nothing is locked, and leftovers of a killed run stay
    fcntl = None


def checked_target(out: Any) -> Path:
    """The folder to write; `CheckpointError` if `out` is no path or something is there already."""
    if not isinstance(out, str | os.PathLike) or not str(out) or "\0" in str(out):
        raise CheckpointError(f"{out!r} is no path to write to.", path=str(out))
    target = Path(out).expanduser()
    if target.is_symlink() or (target.exists() and not _is_empty_folder(target)):
        raise _in_the_way(target)
    return target


def _is_empty_folder(target: Path) -> bool:
    return target.is_dir() and not any(target.iterdir())


def _in_the_way(target: Path) -> CheckpointError:
    return CheckpointError(
        f"{target} exists already; nothing was written. Choose another folder or remove it.",
        path=str(target),
    )


@contextmanager
def written_beside(target: Path) -> Iterator[Path]:
    """A new folder beside `target` that becomes `target` at the end, or is removed.

    Raises `CheckpointError` where the disk is full or the place can't be written, and where
    another process was faster.
    """
    folder, lock = None, None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        folder, lock = _locked_folder(target)
        yield folder
        _rename(folder, target)
    except BaseException as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise CheckpointError(
                f"{target} can't be written: {error}. Nothing was left there.", path=str(target)
            ) from error
        raise
    finally:
        if lock is not None:
            os.close(lock)


def _rename(folder: Path, target: Path) -> None:
    try:
        folder.replace(target)
    except OSError as error:
        if target.exists():
            raise _in_the_way(target) from error
        raise


def _prefix(target: Path) -> str:
    return f".{target.name}.headswap-"


def _locked_folder(target: Path) -> tuple[Path, int | None]:
    """A new folder beside `target`, with the rights that the user's mask gives, and its lock."""
    while True:
        folder = target.parent / f"{_prefix(target)}{secrets.token_hex(4)}"
        folder.mkdir()
        lock = _lock(folder)
        # Another run may have taken it for a leftover before it was locked.
        if fcntl is None or (lock is not None and folder.is_dir()):
            return folder, lock
        if lock is not None:
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """The lock on `folder`; None if another process holds it or it is gone."""
    if fcntl is None:
        return None
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _remove_leftovers(target: Path) -> None:
    """Remove what killed runs into `target` left; folders of running ones are locked and stay."""
    prefix = _prefix(target)
    for folder in [f for f in target.parent.iterdir() if f.name.startswith(prefix)]:
        lock = _lock(folder) if folder.is_dir() and not folder.is_symlink() else None
        if lock is not None:
            with suppress(OSError):
                shutil.rmtree(folder)
            os.close(lock)
