# SPDX-License-Identifier: Apache-2.0
"""One conversion of one checkpoint, decided but not yet run."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from headswap.convert.accounts import account, problems_of
from headswap.convert.adapter import open_source, trained_head, with_head
from headswap.convert.aliases import stored_family, stored_names
from headswap.convert.bidirectional import bidirectional_pooling
from headswap.convert.checkpoint import Checkpoint
from headswap.convert.classes import as_non_stock, head_spec
from headswap.convert.conversion import (
    Conversion,
    inexact,
    label_pairs,
    mark,
    marks,
    stock_name,
)
from headswap.convert.decide import (
    Options,
    architecture_of,
    decide_labels,
    is_decoder_alone,
    label_tokens,
    language_model_of,
    pad_id_of,
    pooling_of,
    stored_head,
    stored_twice,
    task_of,
)
from headswap.convert.drops import drop_reason
from headswap.convert.intent import intended, without_intent
from headswap.convert.labels import LabelSpace
from headswap.convert.layouts import renamed_layout
from headswap.convert.loading import (
    check_place,
    head_tensors,
    meta_state,
    read_class,
)
from headswap.convert.merging import account_adapter, merge_adapter
from headswap.convert.plan import ConversionPlan, TensorPlan
from headswap.convert.remote import resolve_remote
from headswap.convert.serving import Serving, serve
from headswap.convert.stacked import stacks_of
from headswap.convert.weights import check_finite, check_numbers
from headswap.heads import HeadSpec
from headswap.registry import global_registry
from headswap.registry.errors import (
    UnknownArchitectureError,
    WeightError,
)


@dataclass(frozen=True)
class Job:
    """A checkpoint, the class that will serve it, and the config that it will have."""

    checkpoint: Checkpoint
    options: Options
    serving: Serving
    config: Any
    labels: LabelSpace | None
    pad_id: int | None = None
    notes: tuple[str, ...] = ()

    @cached_property
    def key_mapping(self) -> dict[str, str] | None:
        """Registered renamings of stored names, in the form that transformers' loader takes."""
        rules = global_registry.weight_rules(self.checkpoint.architecture or "")
        renamed = {rule.pattern: rule.replacement for rule in rules} | self._head_renames
        own = getattr(self.serving.cls.source_class, "_checkpoint_conversion_mapping", None) or {}
        return {**renamed, **own} if renamed else None

    @cached_property
    def _head_renames(self) -> dict[str, str]:
        """The renamings of a head that is stored elsewhere than its class has it."""
        cls = self.serving.cls
        if cls.conversion.task == "embed" or cls.conversion.label_ids:
            return {}
        names = stored_names(self.checkpoint.headers, head_spec(cls, self.config))
        return {f"^{re.escape(at)}$": name for name, at in names.items() if name != at}

    def source(self) -> tuple[str | None, dict[str, Any]]:
        """Where transformers' loader reads from, and the options that this job fixes."""
        extra: dict[str, Any] = {"config": self.config}
        if self.checkpoint.gguf_file:
            extra["gguf_file"] = self.checkpoint.gguf_file
        if self.key_mapping:
            extra["key_mapping"] = self.key_mapping
        head, checkpoint = trained_head(self.checkpoint), self.checkpoint
        plain = not (checkpoint.quantised or checkpoint.onnx_file or checkpoint.stacks.parts)
        if plain and not (checkpoint.layout or head):
            return str(checkpoint.folder), extra
        extra["state_dict"] = {**checkpoint.tensors(), **head}
        return None, extra

    def load(self, dtype: torch.dtype | None = None, device: Any = None, **split: Any) -> Any:
        """The converted model in eval mode, every tensor accounted for."""
        check_place(dtype, device)
        source, extra = self.source()
        if self.checkpoint.adapter is not None:
            extra["adapt"] = partial(merge_adapter, checkpoint=self.checkpoint)
        model = self.serving.cls.from_pretrained(
            source,
            allow_untrained_head=self.options.allow_untrained_head,
            dtype=dtype or torch.float32,
            **extra,
            **split,
        )
        check_finite(head_tensors(model), self.checkpoint.name)
        if self.pad_id is not None:
            # Not before: a class that is built with a pad id may zero that row of its embedding.
            model.config.get_text_config().pad_token_id = self.pad_id
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
        """The head, every tensor and what is wrong, from the loader run over shapes alone."""
        cls = self.serving.cls
        head = head_spec(cls, cls.conversion.apply(self.config))
        derived = head.tensors() if self._derives else ()
        if self.checkpoint.gguf_file:
            missing = () if self._derives else head.tensors()
            tensors = [TensorPlan(name, "missing", (), "GGUF holds no head") for name in missing]
        else:
            # Label tokens take the language model's rows, so that class is what is loaded.
            loaded = cls.lm_class if self._derives else cls
            extra = {"key_mapping": self.key_mapping} if self.key_mapping else {}
            state = meta_state(dict(self.checkpoint.headers))
            model, info = read_class(
                loaded, None, config=self.config, state_dict=state, device_map={"": "meta"}, **extra
            )
            tensors = account(self.checkpoint, model, info)
            tensors += account_adapter(model, self.checkpoint)
        rows = "output rows of the label tokens"
        tensors += [TensorPlan(name, "derived", (), rows) for name in derived]
        allow = self.options.allow_untrained_head
        return head, tensors, problems_of(tensors, set(head.tensors()), allow)

    @property
    def _derives(self) -> bool:
        return bool(self.serving.cls.conversion.label_ids)


def _known(architecture: str) -> bool:
    try:
        global_registry.resolve(architecture, "classify")
    except UnknownArchitectureError:
        return False
    return True


def prepare(path: Any, options: Options) -> Job:
    """Decide the conversion of the checkpoint at `path`; reads config and headers only.

    Raises `HeadswapError`s that name what was asked, what was found and what to do.
    """
    trust = options.trust_remote_code
    return decide(open_source(path, options.adapter, trust_remote_code=trust), options)


def decide(checkpoint: Checkpoint, options: Options) -> Job:
    """`prepare` for a checkpoint that is open already."""
    asked, said = intended(
        checkpoint,
        options,
        lambda: _has_head(_decided(checkpoint, options)),
    )
    job = _decided(checkpoint, asked)
    return replace(job, notes=(*job.notes, *said))


def _has_head(job: Job) -> bool:
    return stored_head(job.checkpoint, job.serving.cls)


def _with_stacks(checkpoint: Checkpoint, cls: Any) -> Checkpoint:
    """`checkpoint` with the head of `cls` whole where it is stored in parts."""
    if cls.conversion.task == "embed" or cls.conversion.label_ids:
        return checkpoint
    spec = head_spec(cls, cls.conversion.apply(checkpoint.config))
    stacks = stacks_of(spec, checkpoint.headers, checkpoint.name)
    return replace(checkpoint, stacks=stacks) if stacks.parts else checkpoint


def _decided(checkpoint: Checkpoint, options: Options) -> Job:
    stored = marks(checkpoint.config)
    task = options.task or stored.get("task") or task_of(checkpoint)
    architecture = stock_name(architecture_of(checkpoint))
    config = checkpoint.config
    ids, words = label_tokens(checkpoint, options)
    if ids or is_decoder_alone(checkpoint):
        architecture = language_model_of(checkpoint, architecture)
    conversion = Conversion(
        task=task,
        head=options.head or stored.get("head") or stored_family(checkpoint),
        pooling=options.pooling
        or stored.get("pooling")
        or bidirectional_pooling(config)
        or pooling_of(checkpoint, task),
        num_labels=options.num_labels,
        id2label=label_pairs(options.id2label) or words,
        problem_type=options.problem_type,
        label_ids=ids,
        method=options.method,
    )
    remote = None
    if not _known(architecture):
        remote = resolve_remote(checkpoint, architecture, task, options.trust_remote_code)
    if checkpoint.quantised is None:
        check_numbers(checkpoint.headers, drop_reason, checkpoint.name)
    serving = serve(architecture, conversion, config.model_type, resolution=remote)
    checkpoint = _with_stacks(checkpoint, serving.cls)
    checkpoint = replace(checkpoint, layout=renamed_layout(checkpoint, serving.cls, config))
    checkpoint = with_head(checkpoint, serving.cls, serving.cls.conversion.labels is not None)
    config, labels = decide_labels(checkpoint, serving.cls, options)
    if inexact(config):
        serving = replace(serving, cls=as_non_stock(serving.cls), stock=False)
    twice = stored_twice(checkpoint, serving.cls)
    if twice:
        raise WeightError(
            f"{checkpoint.name} stores {twice[0]} with and without its prefix; only one can be "
            "read. Remove the other.",
            missing=(),
            unexpected=twice,
        )
    config = without_intent(config) if ids else config
    pad_id, notes = pad_id_of(checkpoint, options)
    if checkpoint.quantised is not None:
        notes += checkpoint.quantised.notes
    if checkpoint.adapter is not None:
        notes = (f"{checkpoint.adapter.kind} adapter {checkpoint.adapter.folder} merged", *notes)
    if options.template is not None:
        mark(config, template=options.template)
    return Job(checkpoint, options, serving, config, labels, pad_id, notes)
