# SPDX-License-Identifier: Apache-2.0
"""How commands speak: tables for people, JSON for programs, progress on a terminal only."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

out = Console(highlight=False)
"""Answers go to standard output ..."""
err = Console(stderr=True, highlight=False)
"""... and everything about them to standard error, so that a pipe gets answers only."""


def print_json(value: Any) -> None:
    """One JSON value, indented."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def print_json_line(value: Any) -> None:
    """One JSON value on one line."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")


def say(text: str) -> None:
    """Plain text to standard output as it is (rich would turn tabs into spaces)."""
    sys.stdout.write(f"{text}\n")


def note(text: str) -> None:
    """Plain text to standard error."""
    err.print(text, markup=False, soft_wrap=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """A table on a terminal; tab-separated lines elsewhere."""
    if not out.is_terminal:
        for row in rows:
            say("\t".join(re.sub(r"[\t\r\n]", " ", cell) for cell in row))
        return
    table = Table(*columns, title=title or None, title_justify="left")
    for row in rows:
        table.add_row(*row)
    out.print(table, markup=False)


@contextmanager
def progress(what: str) -> Iterator[Any]:
    """A callable (done, total) that draws a bar on a terminal and does nothing elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def quiet_libraries() -> None:
    """transformers draws bars of its own wherever it runs; keep them to a terminal."""
    if not err.is_terminal:
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported
        from transformers.utils import logging

        logging.disable_progress_bar()
