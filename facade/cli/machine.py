# SPDX-License-Identifier: Apache-2.0
"""What machine this is, for whoever reads a measurement. Loads neither torch nor transformers."""

from __future__ import annotations

import os
import platform
from datetime import date
from pathlib import Path
from typing import Any

FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile",
         "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm", "sve")  # fmt: skip
"""Instruction sets that decide how fast matrices are multiplied, as Linux names them."""


def machine() -> dict[str, Any]:
    """Date, processor, cores that may be used, instruction sets, system; what cannot be had is
    empty."""
    facts: dict[str, str] = {}
    for line in _lines("/proc/cpuinfo"):
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    known = set((facts.get("flags") or facts.get("Features") or "").split())
    family = [facts[name] for name in ("cpu family", "model", "stepping") if name in facts]
    return {
        "date": date.today().isoformat(),
        "cpu": facts.get("model name") or platform.processor() or platform.machine(),
        "family": " ".join(family),
        "cores": usable_cores(),
        "flags": [flag for flag in FLAGS if flag in known],
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def peak_mib() -> float | None:
    """The largest resident size that this process has had (VmHWM), in MiB; None where the system
    does not tell."""
    for line in _lines("/proc/self/status"):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return None


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text("utf-8", errors="replace").splitlines() if file.exists() else []
