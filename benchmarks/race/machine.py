# SPDX-License-Identifier: Apache-2.0
"""What machine this is, and how fast it multiplies matrices."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from race.ways import Logits, Spec, Text, Way

SIZES = ((768, 768), (768, 3072), (1024, 3072))
TOKENS = 1024


def described() -> dict[str, Any]:
    """What `headswap bench` says of a machine, and its memory."""
    from headswap.cli.machine import machine  # not where a peer's worker imports this file

    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {**machine(), "memory_gib": round(size / 2**30, 1)}


def free_bytes() -> int:
    """Memory that new processes may take."""
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 60


class Gemm(Way):
    """No peer but the ceiling: the best matrix product that torch offers, plain or with weights in
    oneDNN's layout, in floating-point operations a second."""

    def load(self, spec: Spec) -> None:
        import torch

        torch.set_num_threads(spec.threads)
        self._dtype = getattr(torch, spec.dtype)

    def logits(self, texts: Sequence[Text]) -> Logits:
        import torch

        found = []
        with torch.inference_mode():
            for width, out in SIZES:
                states = torch.randn(TOKENS, width).to(self._dtype)
                weight = torch.randn(out, width).to(self._dtype)
                packed = torch.ops.mkldnn._reorder_linear_weight(weight, TOKENS)
                ways: list[Callable[[], Any]] = [
                    lambda x=states, w=weight: torch.nn.functional.linear(x, w),
                    lambda x=states, w=packed: torch.ops.mkldnn._linear_pointwise(
                        x, w, None, "none", [], ""
                    ),
                ]  # fmt: skip
                found += [2 * TOKENS * width * out / _best(way) for way in ways]
        return [[max(found)]]


def _best(way: Callable[[], Any]) -> float:
    """Seconds of the fastest of as many calls as fit into a fifth of a second."""
    way()
    best, end = float("inf"), time.perf_counter() + 0.2
    while time.perf_counter() < end:
        start = time.perf_counter()
        way()
        best = min(best, time.perf_counter() - start)
    return best
