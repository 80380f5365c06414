# SPDX-License-Identifier: Apache-2.0
"""What a CrossEncoder of sentence-transformers would do and a reranker here does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headswap.convert.checkpoint import Checkpoint
from headswap.convert.modules import read_modules, settings, transformer_settings
from headswap.registry.errors import UnsupportedHeadError


def check_modules(checkpoint: Checkpoint, options: dict[str, Any]) -> dict[str, Any]:
    """`options` as they are; refuses what a CrossEncoder has and headswap does not run.

    Label tokens that a LogitScore module names are read by loading itself.
    """
    after = read_modules(checkpoint.folder)[1:]
    prompt = settings(checkpoint.folder).get("default_prompt_name")
    unknown = [module.kind for module in after if module.kind != "LogitScore"]
    if unknown or len(after) > 1:
        kinds = ", ".join(unknown or [module.kind for module in after])
        raise UnsupportedHeadError(
            f"{checkpoint.name}: modules.json lists {kinds} behind the Transformer; a reranker "
            "here has nothing there, or one LogitScore.",
            module=kinds,
        )
    if prompt:
        raise UnsupportedHeadError(
            f"{checkpoint.name} puts its prompt {prompt!r} before each pair by default, which "
            "headswap does not; remove default_prompt_name and give template=.",
            prompt=prompt,
        )
    _check_transformer(checkpoint)
    return options


def check_form(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose pairs sentence-transformers would put through a chat template.

    From release 5.4 on it does so where the Transformer's modality_config has "message".
    """
    if takes_messages(_transformer(checkpoint)):
        raise UnsupportedHeadError(
            f"{checkpoint.name} was saved to put each pair through the tokenizer's chat template "
            "(modality_config), which headswap does not. Write that form as template=, or give "
            "template=None for the tokenizer's own form of a pair."
        )


def takes_messages(transformer: Mapping[str, Any]) -> bool:
    """Whether a Transformer with these settings makes chat messages of texts."""
    return "message" in (transformer.get("modality_config") or {})


def _transformer(checkpoint: Checkpoint) -> Mapping[str, Any]:
    modules = read_modules(checkpoint.folder)
    return transformer_settings(modules[0].folder) if modules else {}


def _check_transformer(checkpoint: Checkpoint) -> None:
    """Refuse settings that would give other ids than the tokenizer alone."""
    found = _transformer(checkpoint)
    kwargs = found.get("processing_kwargs") or {}
    wrong = ["do_lower_case"] if found.get("do_lower_case") else []
    if any(kwargs.get(kind) for kind in ("text", "common")):
        wrong.append("processing_kwargs")
    if wrong:
        raise UnsupportedHeadError(
            f"{checkpoint.name}: the Transformer module sets "
            f"{', '.join(f'{name}={found[name]}' for name in wrong)}, which a reranker here does "
            "not follow; remove it, and put what it does into the tokenizer's files.",
            settings=tuple(wrong),
        )
