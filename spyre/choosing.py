# SPDX-License-Identifier: Apache-2.0
"""Which attention backend runs a prepared model."""

from __future__ import annotations

import torch
from torch import Tensor

from headswap.spyre.backends import ATTENTION, SHIPPED, Mode, refuse_unsupported
from headswap.spyre.compiling import alone
from headswap.spyre.errors import AttentionError
from headswap.spyre.hook import install
from headswap.spyre.learning import padded_batch, probe_rows, same
from headswap.spyre.packs import run_texts
from headswap.spyre.prepare import Prepared


def choose_attention(
    made: Prepared, name: str, *, planned: bool, paged: bool, fused: bool
) -> tuple[str, bool]:
    """The attention backend by `name`, put to work, and whether rows run in packs.

    `planned`: rows run in given rectangles. `paged`: they run over the paged cache, if they can.
    `fused`: torch's own kernel may be used, of which a card's compiler drops the mask. Raises
    `AttentionError` where a layer wants more than the backend has.
    """
    packs = not planned and not paged and made.hooked
    if name == "auto":
        name = "packed" if packs else "sdpa" if fused and has_kernel(made) else "native"
    backend = ATTENTION.get(name)
    packs = packs and "packed" in backend.modes
    if made.layers:
        mode: Mode = "paged" if paged and made.causal else "packed" if packs else "padded"
        refuse_unsupported(backend, mode, made.features, type(made.model).__name__)
        before = None if name in SHIPPED else _states(made, packs)  # by what was compared already
        install(made.backbone, name)
        if before is not None and not same(_states(made, packs), before):
            raise AttentionError(
                f"Attention backend {name!r} gives {type(made.model).__name__} other numbers than "
                "its own attention does.",
                name=name,
            )
    return name, packs


@alone(compiled=True)
def _states(made: Prepared, packs: bool) -> Tensor:
    """The backbone's states for a few short rows, one behind the other."""
    rows = probe_rows(made.model.config)
    if packs:
        return run_texts(made, rows)
    found = made.backbone(**padded_batch(rows, made.pad), return_dict=True)[0]
    return torch.cat([own[: len(row)] for own, row in zip(found, rows, strict=True)])


def has_kernel(made: Prepared) -> bool:
    """Whether torch's kernel has what every layer wants."""
    return made.features <= ATTENTION.get("sdpa").features
