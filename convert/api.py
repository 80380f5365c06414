# SPDX-License-Identifier: Apache-2.0
"""The public functions: conversions of classes, models and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from headswap.convert.adapter import open_source
from headswap.convert.bidirectional import bidirectional_pooling
from headswap.convert.classes import ConvertedClass
from headswap.convert.conversion import Conversion, Method, label_pairs, stock_name
from headswap.convert.decide import Options
from headswap.convert.derive import label_names, label_token_ids
from headswap.convert.embedding import default_pooling
from headswap.convert.job import prepare
from headswap.convert.parallel import TpPlan, loader_options
from headswap.convert.plan import ConversionPlan
from headswap.convert.serving import serve, serve_class
from headswap.convert.share import convert_model
from headswap.registry import Resolution, Task, global_registry
from headswap.registry.errors import ArchitectureError, ConversionError


def as_seq_cls_model(
    source: Any,
    *,
    num_labels: int | None = None,
    id2label: Mapping[int, str] | Sequence[str] | None = None,
    problem_type: str | None = None,
    head: str | None = None,
    pooling: str | None = None,
    label_tokens: Sequence[str | int] | None = None,
    method: Method | None = None,
    tokenizer: Any = None,
) -> Any:
    """Turn a class or a model into a sequence classifier.

    A class gives a class (the same object for the same arguments; it pickles, and has
    `from_pretrained` and `save_pretrained`); a model gives a model that shares the backbone's
    weights while the source still generates. A classifier comes back as it is.

    `label_tokens` (strings or ids, one a label) makes the head from the model's own output rows;
    `method="difference"` with two of them gives one row, the second minus the first. Strings need
    `tokenizer`. `head` names a head family, `pooling` a rule ("last", "first", "mean",
    "compat"). Without label tokens the head is untrained, and the model says so
    (`.untrained_head`).

    Raises `ConversionError` and its children, and the registry's `ArchitectureError`s.
    """
    return _convert(source, "classify", num_labels=num_labels, id2label=id2label,
                    problem_type=problem_type, head=head, pooling=pooling,
                    label_tokens=label_tokens, method=method, tokenizer=tokenizer)  # fmt: skip


def as_reward_model(
    source: Any,
    *,
    head: str | None = None,
    pooling: str | None = None,
    label_tokens: Sequence[str | int] | None = None,
    method: Method | None = None,
    tokenizer: Any = None,
) -> Any:
    """Like `as_seq_cls_model`, with one label and a raw value: `.logits` is `[batch, 1]`."""
    return _convert(source, "reward", head=head, pooling=pooling, label_tokens=label_tokens,
                    method=method, tokenizer=tokenizer)  # fmt: skip


def as_token_cls_model(
    source: Any,
    *,
    num_labels: int | None = None,
    id2label: Mapping[int, str] | Sequence[str] | None = None,
    head: str | None = None,
) -> Any:
    """Like `as_seq_cls_model`, a label for every token: `.logits` `[batch, length, labels]`."""
    return _convert(source, "token-classify", num_labels=num_labels, id2label=id2label, head=head)


def as_embedding_model(source: Any, *, pooling: str | None = None) -> Any:
    """Turn a class or a model into an embedder: `.pooler_output` `[batch, hidden]`, fp32.

    Pools the last token of a causal model and the mean of an encoder, unless `pooling` says.
    """
    return _convert(source, "embed", pooling=pooling)


def _convert(source: Any, task: Task, **options: Any) -> Any:
    cls = source if isinstance(source, type) else type(source)
    if not issubclass(cls, PreTrainedModel):
        raise ConversionError(
            f"Expected a transformers model or its class; got {source!r}. "
            "For a checkpoint on disk use headswap.load(path).",
            source=source,
        )
    held = _held_task(cls)
    if held is not None and (held == task or (held, task) == ("classify", "reward")):
        if not isinstance(source, type):
            return _unchanged(source, cls, task, options)
        if isinstance(cls, ConvertedClass) or not _given(options):
            return _unchanged(source, cls, task, options)
    conversion = _conversion(source, cls, task, **options)
    if isinstance(source, type):
        return serve_class(_original(cls), conversion)
    return convert_model(source, serve_class(_original(cls), conversion, source.config.model_type))


def _held_task(cls: Any) -> Task | None:
    """What a converted class, or one of transformers' own heads, does; None for a source."""
    if isinstance(cls, ConvertedClass):
        return cast(Task, cast(Any, cls).conversion.task)
    try:
        found = global_registry.get(cls.__name__)
    except ArchitectureError:
        return None
    if found.load() is not cls or found.task in ("embed", "generate"):
        return None
    return found.task


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in options.items() if v is not None and k != "tokenizer"}


def _unchanged(source: Any, cls: Any, task: Task, options: dict[str, Any]) -> Any:
    """The source itself; an option that it does not fulfil is an error, never ignored."""
    asked = _conversion(source, cls, task, **options)
    config = None if isinstance(source, type) else source.config
    held = cast(Any, cls).conversion if isinstance(cls, ConvertedClass) else Conversion(task)
    labels = held.labels if config is None else config.num_labels
    if asked.labels not in (None, labels):
        raise ConversionError(
            f"{cls.__name__} has a head of its own with {labels} labels, not {asked.labels}; "
            "convert the model that it was made from.",
            option="num_labels",
        )
    names = held.id2label if config is None else label_pairs(config.id2label)
    given = _given(options)
    wrong: list[str] = [name for name in ("head", "pooling", "problem_type") if name in given
             and given[name] not in (getattr(held, name), getattr(config, name, None))]  # fmt: skip
    if "id2label" in given and asked.id2label != names:
        wrong.append("id2label")
    if "label_tokens" in given and (asked.label_ids, asked.method) != (held.label_ids, held.method):
        wrong.append("label_tokens")
    if wrong:
        raise ConversionError(
            f"{cls.__name__} has a head of its own, made with another {', '.join(wrong)}; convert "
            "the model that it was made from.",
            option=wrong[0],
        )
    return source


def _original(cls: Any) -> Any:
    """The class behind a converted one, so that conversions don't pile up."""
    if isinstance(cls, ConvertedClass):
        made = cast(Any, cls)
        return made.lm_class or made.source_class
    return cls


def _conversion(
    source: Any,
    cls: Any,
    task: Task,
    *,
    label_tokens: Sequence[str | int] | None = None,
    tokenizer: Any = None,
    id2label: Any = None,
    **options: Any,
) -> Conversion:
    ids: tuple[int, ...] = ()
    pairs = label_pairs(id2label)
    if label_tokens is not None:
        ids = label_token_ids(label_tokens, tokenizer, _vocabulary(source, tokenizer))
        if pairs is None:
            pairs = label_pairs(label_names(label_tokens, options.get("method")))
    if not isinstance(source, type) and options.get("pooling") is None:
        options["pooling"] = bidirectional_pooling(source.config)
    if task == "embed" and options.get("pooling") is None:
        options["pooling"] = default_pooling(cls.config_class.model_type)
    return Conversion(task=task, id2label=pairs, label_ids=ids, **options)


def _vocabulary(source: Any, tokenizer: Any) -> int:
    if not isinstance(source, type):
        return int(source.config.get_text_config().vocab_size)
    # A class has no vocabulary yet; ids out of range are refused when the rows are taken.
    return len(tokenizer) if tokenizer is not None else 2**31


def load(
    path: Any,
    *,
    task: Task | None = None,
    dtype: torch.dtype | None = None,
    device: Any = None,
    tp_plan: TpPlan = None,
    label_tokens: Sequence[str | int] | None = None,
    method: Method | None = None,
    num_labels: int | None = None,
    id2label: Mapping[int, str] | Sequence[str] | None = None,
    problem_type: str | None = None,
    head: str | None = None,
    pooling: str | None = None,
    template: str | None = None,
    tokenizer: Any = None,
    allow_untrained_head: bool = False,
    trust_remote_code: bool = False,
    adapter: Any = None,
) -> Any:
    """Load the checkpoint at `path` (a folder, a .gguf file or a hub id) as a converted model.

    `adapter` is a PEFT adapter (a folder or a hub id) that is merged into the checkpoint; the path
    of an adapter alone loads the base that it names as well. A head that it brings stands in place
    of the checkpoint's own, and label tokens are read from the rows that it leaves.

    `task` is "classify" (the default for causal and base checkpoints), "reward", "embed" or
    "token-classify". `dtype` is the backbone's (fp32 unless given); the head always runs in fp32.
    `label_tokens`, `method`, `head`, `pooling`: see `as_seq_cls_model`. `template` is stored
    with the model for `headswap.text`.

    `tp_plan="auto"`, called by every process of a `torchrun`, splits the backbone by transformers'
    own plan; the head is whole in each, and so are the logits.

    Every stored tensor is used, renamed by transformers' rules or dropped for a known reason.
    Raises `MissingHeadError`, `WeightError`, `LabelError`, `CheckpointError` or the
    registry's errors, each with what was asked, what was found and what to do.
    """
    options = Options(task, label_tokens, method, num_labels, id2label, problem_type, head, pooling,
                      template, tokenizer, allow_untrained_head, trust_remote_code,
                      adapter)  # fmt: skip
    return prepare(path, options).load(dtype, device, **loader_options(tp_plan, device))


def plan(path: Any, **options: Any) -> ConversionPlan:
    """What `load` would do with the same options: printable, `.to_dict()`, no tensor read."""
    for name in ("dtype", "device", "tp_plan"):  # how to load, not what
        options.pop(name, None)
    return prepare(path, Options(**options)).plan()


def resolve(source: Any, task: Task | None = None) -> Resolution:
    """Which class serves an architecture's name, a config or a checkpoint, and by which rule."""
    if isinstance(source, str) and "/" not in source and source.isidentifier():
        return global_registry.resolve(source, task)
    config = source if hasattr(source, "model_type") else open_source(source).config
    for name in config.architectures or global_registry.by_model_type(config.model_type):
        return global_registry.resolve(stock_name(name), task, model_type=config.model_type)
    raise ConversionError(
        f"The config names no architecture and its model type {config.model_type!r} is unknown; "
        "resolve an architecture's name instead.",
        model_type=config.model_type,
    )


def class_by_name(name: str) -> Any:
    """The converted class called `name`, with default options (AttributeError if none is)."""
    try:
        resolution = global_registry.resolve(name)
    except ArchitectureError as error:
        raise AttributeError(str(error)) from error
    if resolution.task == "generate":
        raise AttributeError(f"{name} is not the name of a converted class")
    return serve(name, Conversion(resolution.task), None).cls
