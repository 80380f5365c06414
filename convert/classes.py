# SPDX-License-Identifier: Apache-2.0
"""Makes the concrete class of a conversion, once per request.

A class is the mix of a task's model (`model.py`) with either the architecture's own
classification class ("native": backbone, head, tensor names and loading are transformers'), or the
family's `PreTrainedModel` with a backbone lifted out of the source class and a head from the table.
"""

from __future__ import annotations

import copyreg
import inspect
import re
from dataclasses import replace
from functools import cache
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from headswap.convert.backbone import backbone_name, lift, row_width
from headswap.convert.conversion import NON_STOCK, TASK_SUFFIX, Conversion, marks
from headswap.convert.derive import output_layers
from headswap.convert.model import (
    ConvertedModel,
    EmbeddingModel,
    SequenceClassificationModel,
    TokenClassificationModel,
)
from headswap.heads import (
    Dense,
    HeadFamily,
    HeadSpec,
    Norm,
    default_family,
    family,
    native_family,
)
from headswap.heads.spec import checked_pooling
from headswap.registry import Task
from headswap.registry.errors import UnsupportedHeadError

_TASK_MODEL: dict[Task, type[ConvertedModel]] = {
    "classify": SequenceClassificationModel,
    "reward": SequenceClassificationModel,
    "token-classify": TokenClassificationModel,
    "embed": EmbeddingModel,
}


class ConvertedClass(type):
    """The type of converted classes; exists so that pickle knows how to make one again."""


def _reduce(cls: ConvertedClass) -> Any:
    made: Any = cls
    if "made_from" not in cls.__dict__:
        return cls.__qualname__
    return build_class, made.made_from


copyreg.pickle(ConvertedClass, _reduce)


@cache
def build_class(
    source: type[PreTrainedModel],
    conversion: Conversion,
    name: str,
    native: bool,
    lm_class: type[PreTrainedModel] | None = None,
) -> Any:
    """The class that serves `conversion` with `source`; the same object for the same arguments.

    `native` says that `source` already has the task's head; `lm_class` is the causal class whose
    output rows label tokens refer to.
    """
    parent = source if native else pretrained_parent(source)
    namespace = {
        "__module__": __name__,
        "__qualname__": name,
        "__doc__": f"{source.__name__}, converted by headswap ({conversion.task}).",
        "__init__": _init_native if native else _init_lifted,
        "config_class": source.config_class,
        # Empty in a few of transformers' own classes, whose loading rules then want it empty.
        "base_model_prefix": source.base_model_prefix if native else backbone_name(source),
        "backbone_name": backbone_name(source),
        "conversion": conversion,
        "source_class": source,
        "lm_class": lm_class,
        "native": native,
        "_keep_in_fp32_modules_strict": set(
            getattr(source, "_keep_in_fp32_modules_strict", None) or ()
        ),
        "made_from": (source, conversion, name, native, lm_class),
    }
    return ConvertedClass(name, (_TASK_MODEL[conversion.task], parent), namespace)


def _keep_head_fp32(model: Any) -> None:
    """Have the loader keep the head fp32 whatever dtype is asked for.

    A layer that the family has in the backbone (BERT's pooler) follows the backbone, which runs it
    too; the executor computes with it in fp32. The names are regular expressions to the loader,
    pinned so that a layer called `dense` is not every `dense` of the backbone.
    """
    inside = f"{model.backbone_name}."
    paths = (layer.path for layer in model.head_spec.stored)
    pinned = {rf"(?<!.){re.escape(p)}(?![^.])" for p in paths if not p.startswith(inside)}
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    model._keep_in_fp32_modules_strict = {*kept, *pinned}


def _family(
    asked: str | None, task: Task, source: Any, native: bool, model_type: str
) -> HeadFamily:
    """The family that is asked for, else the native one, else the default."""
    if asked:
        found = family(asked)
        if found.task != ("classify" if task == "reward" else task):
            raise UnsupportedHeadError(
                f"The head family {asked!r} is for task={found.task!r}, not {task!r}.", head=asked
            )
        return found
    if native:
        return native_family(model_type, source, task)
    return default_family(task, model_type)


def pretrained_parent(source: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The family's abstract class: the first ancestor that has no forward of its own.

    It carries what the family needs for loading and placing (dtype rules, split rules, weight
    initialisation) without a language model's head.
    """
    for cls in source.__mro__[1:]:
        if issubclass(cls, PreTrainedModel) and "forward" not in _methods(cls):
            return cls
    return PreTrainedModel


def _methods(cls: type) -> set[str]:
    family_part = cls.__mro__[: cls.__mro__.index(PreTrainedModel)]
    return {name for ancestor in family_part for name in vars(ancestor)}


def _init_native(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    config = self.conversion.apply(config)
    self.source_class.__init__(self, config, *args, **kwargs)
    self.head_spec = head_spec(type(self), config)
    _fit_output(self, self.head_spec.output)
    _keep_head_fp32(self)


def _init_lifted(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    config = self.conversion.apply(config)
    pretrained_parent(self.source_class).__init__(self, config)
    self.num_labels = config.num_labels
    source = self.source_class(config, *args, **{**_without_pooler(self.source_class), **kwargs})
    if getattr(source.config, "is_encoder_decoder", False):
        raise UnsupportedHeadError(
            f"{type(source).__name__} is an encoder-decoder; headswap has no head for it yet."
        )
    setattr(self, self.backbone_name, lift(source))
    self.head_spec = head_spec(type(self), config)
    attach_head(self, self.head_spec, row_width(source))
    self.post_init()
    _keep_head_fp32(self)


def _without_pooler(source: type[PreTrainedModel]) -> dict[str, bool]:
    """Encoders build a pooler unless told not to; a lifted backbone has its head elsewhere."""
    known = inspect.signature(source.__init__).parameters
    return {"add_pooling_layer": False} if "add_pooling_layer" in known else {}


def _fit_output(model: Any, output: Dense) -> None:
    """Give the native output layer the bias or the second row that a mark asks for."""
    linear = model.get_submodule(output.path)
    out = layer_width(output, linear.in_features, model.config.num_labels)
    if linear.out_features != out or (linear.bias is not None) != output.bias:
        _attach(model, output, nn.Linear(linear.in_features, out, bias=bool(output.bias)))


def attach_head(model: Any, spec: HeadSpec, width: int) -> None:
    """Add the head's layers to `model`, each under its path, fp32.

    Raises `UnsupportedHeadError` for a head that only its own backbone can run.
    """
    if spec.pooling in ("pooler", "logits"):
        raise UnsupportedHeadError(
            f"The head family {spec.family!r} is computed inside its own model's backbone; no "
            "other model can have it.",
            head=spec.family,
        )
    for layer in spec.stored:
        if isinstance(layer, Norm):
            _attach(model, layer, _norm(layer, width))
            continue
        out = layer_width(layer, width, model.config.num_labels)
        _attach(model, layer, nn.Linear(width, out, bias=bool(layer.bias)))
        width = out


def _norm(layer: Norm, width: int) -> nn.LayerNorm:
    norm = nn.LayerNorm(width, eps=cast(float, layer.eps), bias=bool(layer.bias))
    # Ones already; transformers 4.57 would fill a bias with zeros that is not there.
    norm._is_hf_initialized = True  # type: ignore[assignment]
    return norm


def layer_width(layer: Dense, hidden: int, labels: int) -> int:
    """How many rows a head's linear layer has."""
    if isinstance(layer.out, int):
        return layer.out
    return labels if layer.out == "labels" else hidden


def _attach(model: nn.Module, layer: Dense | Norm, module: nn.Module) -> None:
    *parents, leaf = layer.path.split(".")
    for name in parents:
        if not hasattr(model, name):
            model.add_module(name, nn.Module())
        model = getattr(model, name)
    model.add_module(leaf, module)


def head_spec(cls: Any, config: Any) -> HeadSpec:
    """The head of class `cls` under `config`, with pooling and marks applied."""
    task = cls.conversion.task
    asked = cls.conversion.pooling or marks(config).get("pooling")
    if task == "embed":
        return HeadSpec("embedding", checked_pooling(asked or "last"))
    head = cls.conversion.head or marks(config).get("head")
    rows = _family(head, task, cls.source_class, cls.native, config.model_type)
    spec = rows.spec(config, base=cls.backbone_name if cls.native else None)
    spec = replace(spec, layers=output_layers(spec.layers, marks(config)))
    if task == "token-classify":
        return replace(spec, pooling="all")
    if asked == "compat":
        return replace(spec, compat=True)
    return replace(spec, pooling=checked_pooling(asked)) if asked else spec


def as_non_stock(cls: Any) -> Any:
    """The same class under a name that no other tool knows, for a head that a stock config cannot
    express: another loader then refuses instead of giving other scores."""
    source, conversion, name, native, lm_class = cls.made_from
    return build_class(source, conversion, non_stock_name(name), native, lm_class)


def non_stock_name(architecture: str) -> str:
    """`LlamaForSequenceClassification` -> `LlamaHeadswapForSequenceClassification`."""
    for suffix in TASK_SUFFIX.values():
        if architecture.endswith(suffix) and NON_STOCK not in architecture:
            return f"{architecture.removesuffix(suffix)}{NON_STOCK}{suffix}"
    return architecture


def __getattr__(name: str) -> Any:
    """The default class of that name, so that `headswap.convert.classes.<name>` is a real path."""
    if name.startswith("_"):
        raise AttributeError(name)
    from headswap.convert.api import class_by_name

    return class_by_name(name)
