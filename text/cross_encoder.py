# SPDX-License-Identifier: Apache-2.0
"""What a CrossEncoder of sentence-transformers would do and a reranker here does not."""

from __future__ import annotations

from typing import Any

from headswap.convert.checkpoint import Checkpoint
from headswap.convert.modules import read_modules, settings
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
    return options
