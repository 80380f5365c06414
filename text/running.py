# SPDX-License-Identifier: Apache-2.0
"""What a classifier has to know of the model that it runs."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import Parameter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from headswap.convert.model import ConvertedModel
from headswap.registry import global_registry

# Here segment ids are looked up in the table of words (`wte(token_type_ids)`), so the zeros that
# some tokenizers add by themselves would put word 0 on every token.
_SEGMENTS_ARE_WORDS = frozenset(
    ("codegen", "ctrl", "flaubert", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "openai-gpt", "xlm")
)


def is_causal(config: Any) -> bool:
    """Whether a model of `config` is a causal language model, whose last token sees the rest."""
    return global_registry.is_causal(config.get_text_config().model_type)


def device_of(model: Any) -> torch.device:
    """Where the model's inputs belong."""
    own = getattr(model, "device", None)
    return torch.device(own) if own is not None else next(model.parameters()).device


def vocabulary(model: Any) -> int | None:
    """How many token ids the model has vectors for; None where it looks none up in one table."""
    try:
        table = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    rows = getattr(table, "num_embeddings", None)
    said = getattr(model.config.get_text_config(), "vocab_size", None)
    return max(rows, said or 0) if isinstance(rows, int) else None


def takes_segments(model: Any) -> bool:
    """Whether `token_type_ids` mean segments to the model, and it can be called with them."""
    model = getattr(model, "_orig_mod", model)
    if getattr(model.config.get_text_config(), "model_type", None) in _SEGMENTS_ARE_WORDS:
        return False
    ours = isinstance(model, ConvertedModel)  # which hands on what its backbone names
    forward = model.backbone.forward if ours else getattr(model, "forward", model)
    known = inspect.signature(forward).parameters
    more = Parameter.VAR_POSITIONAL if ours else Parameter.VAR_KEYWORD
    return "token_type_ids" in known or any(p.kind is more for p in known.values())


# Callers inside, and the modules to put back, by model. Shared by all classifiers of a model: the
# first to leave must not put another's model back into training mode while it still runs.
_lock = threading.Lock()
_inside: WeakKeyDictionary[nn.Module, tuple[int, list[nn.Module]]] = WeakKeyDictionary()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode until the last of the threads that use it is done."""
    with _lock:
        callers, training = _inside.get(model, (0, []))
        if callers == 0:
            training = [module for module in model.modules() if module.training]
        model.eval()
        _inside[model] = callers + 1, training
    try:
        yield
    finally:
        with _lock:
            callers, training = _inside.pop(model)
            if callers > 1:
                _inside[model] = callers - 1, training
            else:
                for module in training:  # one by one: a part that was frozen in eval stays so
                    module.training = True
