# SPDX-License-Identifier: Apache-2.0
"""Opens what texts are run with: a model and its tokenizer, from a path or from memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from os import PathLike
from typing import Any

from headswap.convert.adapter import open_source as open_adapted
from headswap.convert.checkpoint import Checkpoint
from headswap.convert.decide import Options
from headswap.convert.job import decide
from headswap.registry.errors import ConversionError
from headswap.spyre import Executor
from headswap.text.notices import notify
from headswap.text.roles import Role, require, roles_of

Adjust = Callable[[Checkpoint, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Source:
    """A loaded model, its tokenizer, the checkpoint that it came from (None: from memory), and the
    executor that runs it (None: its own forward does)."""

    model: Any
    tokenizer: Any
    checkpoint: Checkpoint | None
    executor: Executor | None = None


def open_source(
    source: Any,
    tokenizer: Any,
    options: dict[str, Any],
    role: Role | None,
    adjust: Adjust | None = None,
) -> Source:
    """Load the checkpoint at `source` with `options` of `headswap.load`, or take a loaded model, or
    an executor of one.

    `adjust` may add options that the checkpoint's other files ask for. `role` None: the caller
    judges what the model can do. Raises `ConversionError` for
    what can't do `role`, before any weight is read, and for options that a loaded model can't have.
    """
    if options.get("template") is not None:  # who has a use for it takes it out before
        raise ConversionError(
            "template= stands around a text or a pair, for a Classifier or a Reranker. An Embedder "
            "takes prompt= or prompt_name= in a call, a RewardModel chat_template=.",
            template=options["template"],
        )
    if not isinstance(source, (str, PathLike)):
        if isinstance(source, Executor):
            opened = open_source(source.model, tokenizer, options, role)
            return replace(opened, executor=source)
        if tokenizer is None:
            raise ConversionError("A loaded model needs tokenizer=; a path brings its own.")
        if options:
            raise ConversionError(
                f"{', '.join(options)}: options of loading, and the model is loaded already."
            )
        if role is not None:
            require(source, role)
        _say_untrained(source)
        return Source(source, tokenizer, None)
    trust = options.get("trust_remote_code", False)
    checkpoint = open_adapted(source, options.get("adapter"), trust_remote_code=trust)
    if adjust is not None:
        options = adjust(checkpoint, options)
    tokenizer = tokenizer if tokenizer is not None else checkpoint.tokenizer()
    unknown = sorted(set(options) - {each.name for each in fields(Options)} - {"dtype", "device"})
    if unknown:
        raise TypeError(f"{', '.join(unknown)}: no option here, and none of headswap.load.")
    dtype, device = options.pop("dtype", None), options.pop("device", None)
    wanted = Options(tokenizer=tokenizer, **options)
    if role not in (None, "classify"):  # a classifier's own errors of loading say more
        roles_of(checkpoint, wanted).require(role, checkpoint.name)
    model = decide(checkpoint, wanted).load(dtype, device)
    if role is not None:
        require(model, role)
    _say_untrained(model)
    return Source(model, tokenizer, checkpoint)


def _say_untrained(model: Any) -> None:
    if getattr(model, "untrained_head", False):
        notify(
            f"The head of {type(model).__name__} holds random numbers (allow_untrained_head=True), "
            "so its answers mean nothing yet; train it (headswap.fit_head)."
        )
