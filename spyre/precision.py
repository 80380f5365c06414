# SPDX-License-Identifier: Apache-2.0
"""In which numbers a model runs: as asked, or as the machine does best."""

from __future__ import annotations

import platform
from typing import Any

import torch

from headswap.spyre.errors import DeviceError
from headswap.spyre.stack import Backend

AUTO = "auto"
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
UNITS = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")
"""CPU flags of units that multiply bf16, by torch's names (`torch.cpu.get_capabilities`)."""


Precision = tuple[torch.dtype | None, bool, str]
"""The backbone's dtype (None: as it is), whether its linear layers multiply in int8, and why."""


def precision(asked: Any, backend: Backend) -> Precision:
    """What `asked` means on `backend`.

    Raises `DeviceError` for what no executor runs in.
    """
    if asked is None:
        return None, False, ""
    if asked == AUTO:
        found, why = best(backend)
        return found, False, f", auto: {why}"
    if asked is torch.int8:
        _refuse_int8(backend)
        return None, True, ""
    if asked not in FLOATS:
        raise DeviceError(
            f"dtype={asked!r} is none of {', '.join(map(str, FLOATS))}, torch.int8 and 'auto'."
        )
    return asked, False, ""


def best(backend: Backend | None = None) -> tuple[torch.dtype, str]:
    """The dtype that `backend` (None: this CPU) is made for, and what says so."""
    if backend is not None and backend.on_card:
        name = backend.spec.dtype
        return getattr(torch, name), f"the card computes in {name}"
    known = capabilities()
    units = [name for name in UNITS if known.get(name)]
    if units:
        return torch.bfloat16, f"this CPU has {units[0]}"
    return torch.float32, "this CPU has no unit for bf16"


def capabilities() -> dict[str, Any]:
    """What torch knows of this CPU."""
    return dict(torch.cpu.get_capabilities())


def _refuse_int8(backend: Backend) -> None:
    if backend.compiler is not None:
        raise DeviceError(
            f"dtype=torch.int8 runs on backend='eager'; {backend.name!r} compiles layers as they "
            "are."
        )
    if not hasattr(torch.ops.onednn, "qlinear_pointwise") or not capabilities().get("avx512_vnni"):
        raise DeviceError(
            "dtype=torch.int8 needs oneDNN and a CPU with AVX-512 VNNI, where sums of int8 "
            f"products are exact; this one is {platform.processor() or platform.machine()}."
        )
