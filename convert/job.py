# SPDX-License-Identifier: Apache-2.0
"""One conversion of one checkpoint, decided but not yet run."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch

from headswap.convert.checkpoint import Checkpoint, open_checkpoint
from headswap.convert.classes import as_non_stock, head_spec
from headswap.convert.conversion import (
    Conversion,
    Method,
    inexact,
    label_pairs,
    mark,
    marks,
    stock_name,
)
from headswap.convert.derive import label_names, label_token_ids
from headswap.convert.labels import LabelSpace, label_space
from headswap.convert.loading import LoadingInfo, drop_reason, meta_state, read_class
from headswap.convert.plan import ConversionPlan, TensorPlan
from headswap.convert.serving import Serving, serve
from headswap.heads import HeadSpec
from headswap.registry import Task, global_registry
from headswap.registry.errors import CheckpointError, ConversionError, HeadswapError

MOST = 6
"""Tensors that a plan's problems name one by one."""


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


@dataclass(frozen=True)
class Job:
    """A checkpoint, the class that will serve it, and the config that it will have."""

    checkpoint: Checkpoint
    options: Options
    serving: Serving
    config: Any
    labels: LabelSpace | None
    notes: tuple[str, ...] = ()

    @cached_property
    def key_mapping(self) -> dict[str, str] | None:
        """Registered renamings of stored names, in the form that transformers' loader takes."""
        rules = global_registry.weight_rules(self.checkpoint.architecture or "")
        own = getattr(self.serving.cls.source_class, "_checkpoint_conversion_mapping", None) or {}
        added = {rule.pattern: rule.replacement for rule in rules} | self._bare_names()
        return {**own, **added} if added else None

    def _bare_names(self) -> dict[str, str]:
        """A prefix for backbone tensors that are stored without one, beside a stored head.

        transformers 5 finds this out by itself; 4.57 takes the file for a damaged one.
        """
        cls, stored = self.serving.cls, self.checkpoint.headers
        if (
            importlib.util.find_spec("transformers.core_model_loading")
            or cls.conversion.task == "embed"
        ):
            return {}
        prefix = cls.base_model_prefix
        head = {layer.path.split(".")[0] for layer in head_spec(cls, self.config).dense}
        bare = not any(name.startswith(f"{prefix}.") for name in stored)
        if not bare or not any(name.split(".")[0] in head for name in stored):
            return {}
        return {rf"^(?!({'|'.join(sorted(head))})\.)": f"{prefix}."}

    def loader_options(self) -> dict[str, Any]:
        """Arguments of `from_pretrained` that this job fixes."""
        extra: dict[str, Any] = {"config": self.config}
        if self.checkpoint.gguf_file:
            extra["gguf_file"] = self.checkpoint.gguf_file
        if self.key_mapping:
            extra["key_mapping"] = self.key_mapping
        return extra

    def load(self, dtype: torch.dtype | None = None, device: Any = None) -> Any:
        """The converted model in eval mode, every tensor accounted for."""
        model = self.serving.cls.from_pretrained(
            str(self.checkpoint.folder),
            allow_untrained_head=self.options.allow_untrained_head,
            dtype=dtype or torch.float32,
            **self.loader_options(),
        )
        return model if device is None else model.to(device)

    def plan(self) -> ConversionPlan:
        """The plan, from transformers' own loader run over shapes without data."""
        head, tensors, problems = self._dry_run()
        cls = self.serving.cls
        config = cls.conversion.apply(self.config)
        return ConversionPlan(
            source=self.checkpoint.name,
            architecture=self.checkpoint.architecture,
            resolution=self.serving.resolution,
            head=head,
            labels=tuple(config.id2label[index] for index in sorted(config.id2label))
            if cls.conversion.task != "embed" else (),
            label_source=self.labels.source if self.labels else "transformers' default",
            labels_generated=self.labels.generated if self.labels else True,
            problem_type=config.problem_type,
            stock=self.serving.stock,
            tensors=tuple(tensors),
            problems=tuple(problems),
            notes=self.notes,
        )  # fmt: skip

    def _dry_run(self) -> tuple[HeadSpec, list[TensorPlan], list[str]]:
        cls = self.serving.cls
        if self.checkpoint.gguf_file:
            with torch.device("meta"):
                model = cls(self.config)
            info = LoadingInfo(model.head_spec.tensors(), (), ())
        else:
            state = meta_state(dict(self.checkpoint.headers))
            extra = {"key_mapping": self.key_mapping} if self.key_mapping else {}
            model, info = read_class(
                cls, None, config=self.config, state_dict=state, device_map={"": "meta"}, **extra
            )
        tensors = list(_account(self.checkpoint, model, info, self._derives))
        head = set(model.head_spec.tensors())
        problems = _problems(tensors, head, self.options.allow_untrained_head)
        return model.head_spec, tensors, problems

    @property
    def _derives(self) -> bool:
        return bool(self.serving.cls.conversion.label_ids)


def _account(ckpt: Checkpoint, model: Any, info: LoadingInfo, derives: bool) -> list[TensorPlan]:
    needed = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    head = set(model.head_spec.tensors())
    wrong = {name for name, _, _ in info.mismatched}
    found = []
    for name, (shape, _) in sorted(ckpt.headers.items()):
        if name in info.unexpected:
            reason = drop_reason(name)
            found.append(TensorPlan(name, "dropped" if reason else "unexpected", shape,
                                    reason or "no place for it"))  # fmt: skip
        elif name not in wrong:
            found.append(TensorPlan(name, "used" if name in needed else "renamed", shape))
    for name in info.missing:
        derived = derives and name in head
        reason = "output rows of the label tokens" if derived else "not in the checkpoint"
        shape = needed.get(name, ())
        found.append(TensorPlan(name, "derived" if derived else "missing", shape, reason))
    for name, stored, wanted in info.mismatched:
        reason = f"the class needs {list(wanted)}"
        found.append(TensorPlan(name, "mismatched", stored, reason))
    return found


def _problems(tensors: list[TensorPlan], head: set[str], allow_untrained: bool) -> list[str]:
    bad = [t for t in tensors if t.action in ("missing", "unexpected", "mismatched")]
    headless = [t for t in bad if t.action == "missing" and t.name in head]
    if allow_untrained:
        bad = [t for t in bad if t not in headless]
    problems = [f"{t.action}: {t.name} ({t.reason})" for t in bad[:MOST]]
    if len(bad) > MOST:
        problems.append(f"and {len(bad) - MOST} more tensors")
    if headless and not allow_untrained:
        problems.append(
            "give label_tokens to make the head from output rows, or allow_untrained_head=True"
        )
    return problems


def prepare(path: Any, options: Options) -> Job:
    """Decide the conversion of the checkpoint at `path`; reads config and headers only.

    Raises `HeadswapError`s that name what was asked, what was found and what to do.
    """
    checkpoint = open_checkpoint(path, trust_remote_code=options.trust_remote_code)
    stored = marks(checkpoint.config)
    task = options.task or stored.get("task") or _task(checkpoint)
    architecture = stock_name(_architecture(checkpoint))
    config = checkpoint.config
    ids, words = _label_tokens(checkpoint, options)
    conversion = Conversion(
        task=task,
        head=options.head or stored.get("head"),
        pooling=options.pooling or stored.get("pooling") or _pooling(checkpoint, task),
        num_labels=options.num_labels,
        id2label=label_pairs(options.id2label) or words,
        problem_type=options.problem_type,
        label_ids=ids,
        method=options.method,
    )
    serving = serve(architecture, conversion, config.model_type)
    config, labels = _decide_labels(checkpoint, serving.cls, options)
    if inexact(config):
        serving = replace(serving, cls=as_non_stock(serving.cls), stock=False)
    notes = _set_pad_id(config, checkpoint, options)
    if options.template is not None:
        mark(config, template=options.template)
    return Job(checkpoint, options, serving, config, labels, notes)


def _task(checkpoint: Checkpoint) -> Task:
    """What the stored architecture is for; a causal or base checkpoint becomes a classifier."""
    if checkpoint.architecture is None:
        return "classify"
    try:
        found = global_registry.resolve(stock_name(checkpoint.architecture)).task
    except HeadswapError:
        return "classify"
    return "classify" if found in ("generate", "embed") else found


def _architecture(checkpoint: Checkpoint) -> str:
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


def _pooling(checkpoint: Checkpoint, task: Task) -> str | None:
    if task != "embed":
        return None
    from headswap.convert.embedding import stored_pooling

    return stored_pooling(checkpoint)


def _label_tokens(checkpoint: Checkpoint, options: Options) -> tuple[tuple[int, ...], Any]:
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


def _decide_labels(
    checkpoint: Checkpoint, cls: Any, options: Options
) -> tuple[Any, LabelSpace | None]:
    """The config with the number of labels that the stored head has, and who decided."""
    config = cls.conversion.apply(checkpoint.config)
    if cls.conversion.task == "embed":
        return config, None
    spec = head_spec(cls, config)
    tensor = f"{spec.output.path}.weight"
    header = checkpoint.headers.get(tensor)
    if header is not None and cls.conversion.label_ids:
        raise ConversionError(
            f"{checkpoint.name} already has a head ({tensor}); drop label_tokens to use it, or "
            "convert the causal checkpoint that it was made from."
        )
    biased = f"{spec.output.path}.bias" in checkpoint.headers
    if header is not None and biased and not spec.output.bias:
        mark(config, head_bias=True)
    rows = None if header is None or marks(config).get("difference") else header[0][0]
    labels = label_space(_raw(checkpoint), tensor, rows, cls.conversion.labels)
    if labels is not None and labels.count != config.num_labels:
        config.num_labels = labels.count
    return config, labels


def _raw(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The stored config, without label fields where the checkpoint has no classification head
    (transformers writes two made-up labels into many causal configs)."""
    name = checkpoint.architecture or ""
    return checkpoint.raw if "Classification" in name else {}


def _set_pad_id(config: Any, checkpoint: Checkpoint, options: Options) -> tuple[str, ...]:
    """Take the tokenizer's pad id where the config has none; says so."""
    text = config.get_text_config()
    if text.pad_token_id is not None or not (options.tokenizer or checkpoint.has_tokenizer):
        return ()
    tokenizer = options.tokenizer or checkpoint.tokenizer()
    if tokenizer.pad_token_id is None:
        return ("neither config nor tokenizer has a pad token; pass attention_mask",)
    text.pad_token_id = cast(int, tokenizer.pad_token_id)
    return (f"pad_token_id {text.pad_token_id} taken from the tokenizer",)
