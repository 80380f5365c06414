# SPDX-License-Identifier: Apache-2.0
"""Converted checkpoints that are kept between runs, each checked before it is used again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from headswap.cli.packages import sha256

MANIFEST = "sha256.json"


def cache_folder(given: Path | None) -> Path:
    """Where checkpoints are kept: as given, else under the user's cache folder (XDG)."""
    if given is not None:
        return given.expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base, "headswap", "demo")


def cached(folder: Path, make: Callable[[Path], object]) -> Path:
    """`folder` if it is complete and unchanged, else made anew by `make(path)`.

    It is made beside its place and renamed, so a run that is broken off leaves nothing behind that
    a later run would trust.
    """
    if _intact(folder):
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    beside = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.parent.mkdir(parents=True, exist_ok=True)
    try:
        make(beside)
        sums = {f.name: sha256(f) for f in sorted(beside.iterdir()) if f.is_file()}
        (beside / MANIFEST).write_text(json.dumps(sums, indent=1))
        beside.replace(folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return folder


def _intact(folder: Path) -> bool:
    try:
        sums = json.loads((folder / MANIFEST).read_text())
        return bool(sums) and all(sha256(folder / name) == sums[name] for name in sums)
    except (OSError, ValueError, AttributeError):
        return False
