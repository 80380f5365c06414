# SPDX-License-Identifier: Apache-2.0
"""Which attention backend runs a prepared model."""

from __future__ import annotations

from headswap.spyre.backends import ATTENTION, Mode, refuse_unsupported
from headswap.spyre.hook import install
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
        install(made.backbone, name)
    return name, packs


def has_kernel(made: Prepared) -> bool:
    """Whether torch's kernel has what every layer wants."""
    return made.features <= ATTENTION.get("sdpa").features
