# SPDX-License-Identifier: Apache-2.0
"""Decides which class serves a conversion: the architecture's own, or a lifted backbone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from headswap.convert.classes import build_class, non_stock_name
from headswap.convert.conversion import TASK_SUFFIX, Conversion
from headswap.heads import Activation, When, default_family, native_family
from headswap.registry import Resolution, Task, global_registry
from headswap.registry.errors import (
    ArchitectureError,
    ConversionError,
    UnsupportedHeadError,
)


@dataclass(frozen=True)
class Serving:
    """The class of a conversion, how it was found, and whether its checkpoints are stock ones."""

    cls: Any
    resolution: Resolution
    stock: bool


def serve(
    architecture: str,
    conversion: Conversion,
    model_type: str | None,
    source: Any = None,
    resolution: Resolution | None = None,
) -> Serving:
    """The class that turns `architecture` into what `conversion` asks for.

    `source` is the class at hand (for conversions of classes and models); None lets the registry
    choose; a given `resolution` (a checkpoint's own code) stands in place of the registry's.
    Raises the registry's errors, and `UnsupportedHeadError` for a head without a row.
    """
    if resolution is None:
        resolution = global_registry.resolve(architecture, conversion.task, model_type=model_type)
    elif resolution.entry.task == "generate":
        source = resolution.entry.load()
    _check_served(architecture)
    served = resolution.entry.load()
    native = resolution.native and conversion.task != "embed"
    if source is not None and resolution.entry.architecture == architecture:
        served = source
    conversion = _normalised(conversion, resolution, served, native, model_type)
    if (
        native
        and conversion.head is None
        and (
            _is_decoder_alone(architecture, served, model_type)
            or (conversion.label_ids and not _scores_last_token(served, model_type))
        )
    ):
        conversion = replace(conversion, head=default_family(conversion.task).name)
    if conversion.head is not None and native:
        native = False
        served = source if source is not None else _liftable(architecture, resolution, model_type)
    lm_class = None
    if conversion.label_ids:
        lm_class = source if source is not None else _causal(architecture)
    stock = _is_stock(native, resolution, conversion)
    name = resolution.architecture if stock else non_stock_name(resolution.architecture)
    cls = build_class(served, conversion, name, native, lm_class)
    return Serving(cls, resolution, stock and native)


# What no score head can be put on, and why.
_AUDIO = "it reads and writes audio codes, not text"
_STREAMS = (
    "its output embedding reads a second stream, which predicts the next token and which its "
    "decoder does not give as its hidden state"
)
REFUSED = {
    "MusicgenForCausalLM": _AUDIO,
    "MusicgenMelodyForCausalLM": _AUDIO,
    "ProphetNetForCausalLM": _STREAMS,
    "XLMProphetNetForCausalLM": _STREAMS,
}


def _check_served(architecture: str) -> None:
    if architecture in REFUSED:
        raise UnsupportedHeadError(
            f"{architecture} becomes no classifier: {REFUSED[architecture]}. Convert another "
            "architecture.",
            architecture=architecture,
        )


def _is_decoder_alone(architecture: str, native: Any, model_type: str | None) -> bool:
    """Whether the source is the decoder of an encoder-decoder (`BartForCausalLM`), which lacks the
    encoder that the classification class of its type has."""
    if not architecture.endswith("ForCausalLM"):
        return False
    kind = model_type or native.config_class.model_type
    return native_family(kind, native, "classify").pooling == "eos"


def _scores_last_token(native: Any, model_type: str | None) -> bool:
    """Whether the class's own head is one linear on the last token, as output rows are."""
    rows = native_family(model_type or native.config_class.model_type, native, "classify")
    plain = not any(isinstance(layer, Activation | When) for layer in rows.layers)
    return plain and rows.pooling not in ("first", "mean", "eos") and len(list(rows.paths())) == 1


def _normalised(
    conversion: Conversion, resolution: Resolution, served: Any, native: bool, model_type: Any
) -> Conversion:
    """`conversion` with the entry's head filled in, or dropped where it is the native one."""
    head = conversion.head or resolution.entry.head
    if head and native and resolution.entry.head is None:
        own = native_family(model_type or served.config_class.model_type, served, conversion.task)
        head = None if own.name == head else head
    return replace(conversion, head=head)


def _is_stock(native: bool, resolution: Resolution, conversion: Conversion) -> bool:
    implicit = not native and not resolution.native
    return conversion.head is None and conversion.pooling is None and (native or implicit)


def _liftable(architecture: str, resolution: Resolution, model_type: str | None) -> Any:
    """The class whose backbone carries another head: the causal one, else the base class."""
    try:
        entry = global_registry.get(architecture)
    except ArchitectureError:  # a name that a suffix rule serves
        entry, architecture = resolution.entry, resolution.entry.architecture
    if entry.task == "generate":
        return entry.load()
    return global_registry.resolve(architecture, "embed", model_type=model_type).entry.load()


def _causal(architecture: str) -> Any:
    entry = global_registry.get(architecture)
    if entry.task != "generate":
        raise ConversionError(
            f"Label tokens need a language model's output rows, but {architecture} has none; "
            "convert the causal checkpoint that it was made from.",
            architecture=architecture,
        )
    return entry.load()


def serve_class(source: Any, conversion: Conversion, model_type: str | None = None) -> Any:
    """The converted class of the class `source`, which the registry may not know."""
    model_type = model_type or getattr(source.config_class, "model_type", None)
    if _registry_knows(source, conversion.task):
        return serve(source.__name__, conversion, model_type, source).cls
    if source.__module__.startswith("transformers.") and not conversion.label_ids:
        # Another head of one of transformers' own types, such as question answering.
        for known in global_registry.by_model_type(str(model_type)):
            return serve(known, conversion, model_type).cls
    lm_class = source if conversion.label_ids else None
    name = stem(source.__name__) + TASK_SUFFIX[conversion.task]
    return build_class(source, conversion, name, False, lm_class)


def _registry_knows(source: Any, task: Task) -> bool:
    try:
        known = global_registry.get(source.__name__)
    except ArchitectureError:
        return False
    return known.load() is source


def stem(architecture: str) -> str:
    """`LlamaForCausalLM` -> `Llama`; the name itself where no suffix rule fits."""
    from headswap.registry.rules import split

    found = split(architecture, global_registry.rules)
    return found[0] if found else architecture
