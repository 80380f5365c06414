# SPDX-License-Identifier: Apache-2.0
"""Runs the command line in a process of its own, as a user does."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


def headswap(*arguments: Any, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """What `headswap ARGUMENTS` leaves: status, standard output, standard error."""
    code = "from headswap.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        input=stdin, capture_output=True, text=True, check=False,
    )  # fmt: skip
