# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's files and the options decide together, each in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from headswap.convert.aliases import stored_names
from headswap.convert.checkpoint import Checkpoint
from headswap.convert.classes import head_spec
from headswap.convert.conversion import Method, label_pairs, mark, marks, stock_name, text_field
from headswap.convert.derive import label_names, label_token_ids
from headswap.convert.labels import LabelSpace, label_space
from headswap.registry import Task, global_registry
from headswap.registry.errors import (
    ArchitectureError,
    CheckpointError,
    ConversionError,
    LabelError,
)

Value = TypeVar("Value")


@dataclass(frozen=True)
class Options:
    """The options that `plan`, `load` and `convert_checkpoint` share; see `headswap.load`."""

    task: Task | None = None
    label_tokens: Sequence[str | int] | None = None
    method: Method | None = None
    num_labels: int | None = None
    id2label: Any = None
    problem_type: str | None = None
    head: str | None = None
    pooling: str | None = None
    template: str | None = None
    tokenizer: Any = None
    allow_untrained_head: bool = False
    trust_remote_code: bool = False
    adapter: Any = None


def task_of(checkpoint: Checkpoint) -> Task:
    """What the adapter was trained for, else what the stored architecture is for; a causal or base
    checkpoint becomes a classifier."""
    if checkpoint.adapter is not None and checkpoint.adapter.task is not None:
        return checkpoint.adapter.task
    own = own_task(checkpoint)
    return "classify" if own in ("generate", "embed", None) else own


def own_task(checkpoint: Checkpoint) -> Task | None:
    """What the stored architecture does by its name; None for one that says nothing."""
    if checkpoint.architecture is None:
        return None
    try:
        return global_registry.resolve(stock_name(checkpoint.architecture)).task
    except ArchitectureError:
        return None


def architecture_of(checkpoint: Checkpoint) -> str:
    """The stored architecture, else the causal (or base) class of the model type."""
    if checkpoint.architecture is not None:
        return checkpoint.architecture
    for name in global_registry.by_model_type(checkpoint.config.model_type):
        return name
    raise CheckpointError(
        f"{checkpoint.name} names no architecture and its model type "
        f'{checkpoint.config.model_type!r} is unknown; add "architectures" to config.json.',
        path=checkpoint.name,
    )


def language_model_of(checkpoint: Checkpoint, architecture: str) -> str:
    """The causal class of a checkpoint that names a classification class and is to give the rows
    of its label tokens: other tools rename a causal checkpoint so, and store no head."""
    if own_task(checkpoint) not in ("classify", "reward"):
        return architecture
    kind = checkpoint.config.model_type
    for name in global_registry.by_model_type(kind):
        if global_registry.get(name).task == "generate":
            return name
    return architecture


def is_decoder_alone(checkpoint: Checkpoint) -> bool:
    """Whether a classifier of an encoder-decoder type holds the decoder only, as one made of a
    `BartForCausalLM` does."""
    made_here = bool(marks(checkpoint.config).get("head"))
    return made_here and checkpoint.raw.get("is_encoder_decoder") is False


def stored_head(checkpoint: Checkpoint, cls: Any) -> bool:
    """Whether the head that `cls` has is stored, under whatever name."""
    spec = head_spec(cls, cls.conversion.apply(checkpoint.config))
    return bool(stored_names(checkpoint.headers, spec))


def pooling_of(checkpoint: Checkpoint, task: Task) -> str | None:
    if task != "embed":
        return None
    from headswap.convert.embedding import stored_pooling

    return stored_pooling(checkpoint)


def label_tokens(checkpoint: Checkpoint, options: Options) -> tuple[tuple[int, ...], Any]:
    """Token ids of the labels, and the label names that they give."""
    tokens = options.label_tokens
    if tokens is None:
        return (), None
    tokenizer = options.tokenizer
    if tokenizer is None and any(isinstance(token, str) for token in tokens):
        tokenizer = checkpoint.tokenizer()
    ids = label_token_ids(tokens, tokenizer, checkpoint.config.get_text_config().vocab_size)
    if options.id2label is not None:
        return ids, None
    return ids, label_pairs(label_names(tokens, options.method))


def decide_labels(
    checkpoint: Checkpoint, cls: Any, options: Options
) -> tuple[Any, LabelSpace | None]:
    """The config with the number of labels that the stored head has, and who decided."""
    config = cls.conversion.apply(checkpoint.config)
    if cls.conversion.task == "embed":
        return config, None
    spec = head_spec(cls, config)
    tensor = f"{spec.output.path}.weight"
    names = stored_names(checkpoint.headers, spec)
    tensor = names.get(tensor, tensor)
    header = checkpoint.headers.get(tensor)
    if header is not None and cls.conversion.label_ids:
        raise ConversionError(
            f"{checkpoint.name} already has a head ({tensor}); drop label_tokens to use it, or "
            "convert the causal checkpoint that it was made from."
        )
    biased = f"{spec.output.path}.bias" in names
    if header is not None and biased and not spec.output.bias:
        mark(config, head_bias=True)
    if header is not None and len(header[0]) != 2:
        raise CheckpointError(
            f"{checkpoint.name}: {tensor} has shape {list(header[0])}; a head is [labels, hidden].",
            path=checkpoint.name,
        )
    if header is not None and not header[0][0]:
        raise LabelError(f"{checkpoint.name}: {tensor} has no rows, so there is no label.")
    rows = None if header is None or marks(config).get("difference") else header[0][0]
    labels = label_space(
        _raw(checkpoint), tensor, rows, cls.conversion.labels, cls.conversion.id2label is not None
    )
    if labels is not None and labels.count != config.num_labels:
        config.num_labels = labels.count
    return config, labels


def _raw(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The stored config, without label fields where the checkpoint has no classification head
    (transformers writes two made-up labels into many causal configs)."""
    if checkpoint.head_labels is not None:
        return checkpoint.head_labels
    own = own_task(checkpoint)
    return {} if own in ("generate", "embed", None) else checkpoint.raw


def pad_id_of(checkpoint: Checkpoint, options: Options) -> tuple[int | None, tuple[str, ...]]:
    """The pad id to give a model whose config has none, taken from the tokenizer, and a note."""
    stored = text_field(checkpoint.config, "pad_token_id")
    if stored is not None or not (options.tokenizer or checkpoint.has_tokenizer):
        return None, ()
    found = (options.tokenizer or checkpoint.tokenizer()).pad_token_id
    if found is None:
        return None, ("neither config nor tokenizer has a pad token; pass attention_mask",)
    return int(found), (f"pad_token_id {found} taken from the tokenizer",)


def stored_twice(checkpoint: Checkpoint, cls: Any) -> tuple[str, ...]:
    """Names that are stored with the backbone's prefix and without it."""
    stored, prefix = checkpoint.headers, cls.backbone_name
    return tuple(name for name in sorted(stored) if f"{prefix}.{name}" in stored)
