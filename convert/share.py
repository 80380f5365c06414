# SPDX-License-Identifier: Apache-2.0
"""Converts a model in memory: a new model around the source's own tensors."""

from __future__ import annotations

import copy
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PreTrainedModel

from headswap.convert.backbone import lift
from headswap.convert.bidirectional import check_bidirectional
from headswap.convert.classes import as_non_stock
from headswap.convert.conversion import inexact, mark, marks, unmarked
from headswap.convert.derive import (
    DerivedHead,
    check_derived,
    derive_head,
    is_packed,
    probe_ids,
    refuse_packed,
)
from headswap.convert.model import ConvertedModel
from headswap.convert.parallel import mesh_of, settle, share_split
from headswap.registry.errors import ConversionError


def convert_model(source: PreTrainedModel, cls: Any) -> Any:
    """A `cls` model that shares every tensor of `source`'s backbone.

    Modules and config are copies, so that modes, hooks and labels of one don't show in the other;
    `source` still generates. The head is new: derived from the output rows where the class has
    label tokens, else freshly initialised and marked as untrained.
    """
    mesh_of(source)  # refuses what cannot be shared
    _unpack(source)
    derived = None
    if cls.conversion.label_ids:
        derived = derive_head(source, cls.conversion.label_ids, cls.conversion.method)
    config = cls.conversion.apply(_config(source))
    mark(config, **(derived.marks if derived else {"untrained_head": _has_head(cls)}))
    if inexact(config):
        cls = as_non_stock(cls)
    model = _without_data(cls, config)
    _share_backbone(model, source)
    made = _materialise(model, source.device)
    settle(model)
    if marks(config).get("untrained_head"):
        # Not the parts of a head that the source's backbone brought along, such as a pooler.
        head = [name for name in model.head_spec.tensors() if name.rpartition(".")[0] in made]
        mark(model.config, untrained_head=head or True)
    if derived:
        _fill(model, derived)
        check_derived(source, model.eval(), cls.conversion.label_ids, cls.conversion.method)
    check_bidirectional(model.eval())
    return model.train(source.training)


def _unpack(source: PreTrainedModel) -> None:
    """Have compressed-tensors unpack `source`, which it does at the first call and for the model as
    a whole; a backbone taken out before would stay packed for good."""
    linear = [(n, m) for n, m in source.named_modules() if type(m) is nn.Linear]
    packed = [n for n, m in linear if hasattr(m, "quantization_scheme") and is_packed(m)]
    if not packed:
        return
    with torch.no_grad():
        source(input_ids=probe_ids(source.config.get_text_config().vocab_size, source.device))
    refuse_packed(source.get_submodule(packed[0]), packed[0])


def _without_data(cls: Any, config: Any) -> Any:
    """A `cls` model whose parameters take no memory."""
    try:
        with torch.device("meta"):
            return cls(config)
    except NotImplementedError:  # the class computes with its buffers while it is built
        with init_empty_weights(include_buffers=False):
            return cls(config)


def _config(source: PreTrainedModel) -> Any:
    """The source's config, without what an earlier conversion wrote about another head."""
    return unmarked(source.config) if isinstance(source, ConvertedModel) else source.config


def _has_head(cls: Any) -> bool | None:
    return True if cls.conversion.task != "embed" else None


def _share_backbone(model: Any, source: PreTrainedModel) -> None:
    """Put a copy of the source's backbone, over the same tensors, into `model`."""
    backbone = lift(source)
    if type(backbone) is not type(model.backbone):
        _adopt(model.backbone, backbone)
        return
    tensors = [*backbone.parameters(), *backbone.buffers()]
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    memo[id(source.config)] = model.config
    shared = copy.deepcopy(backbone, memo)
    share_split(model, shared, source, backbone)
    fresh = model.backbone
    for name, module in fresh.named_children():
        # A pooler that the head keeps in the backbone, and that the source was built without.
        if getattr(shared, name, None) is None:
            setattr(shared, name, module)
    for name in [name for name, _ in shared.named_children() if getattr(fresh, name, 0) is None]:
        # The other way round: a pooler that this model does without, its head being elsewhere.
        setattr(shared, name, None)
    setattr(model, model.backbone_name, shared)


def _adopt(fresh: nn.Module, backbone: nn.Module) -> None:
    """Put the tensors of `backbone` into `fresh`, a smaller class of the same names (Funnel's
    classifier does without the decoder). Raises `ConversionError` unless all of them are there."""
    held = {**dict(backbone.named_parameters()), **dict(backbone.named_buffers())}
    for path, module in fresh.named_modules():
        for name, own in [*module._parameters.items(), *module._buffers.items()]:
            found = held.get(f"{path}.{name}".lstrip("."))
            if own is None:
                continue
            if found is None or found.shape != own.shape:
                raise ConversionError(
                    f"The source runs a {type(backbone).__name__}, and this conversion needs a "
                    f"{type(fresh).__name__}, whose tensor {path}.{name} it does not have; load "
                    "the checkpoint with headswap.load()."
                )
            (module._parameters if name in module._parameters else module._buffers)[name] = found


def _materialise(model: Any, device: torch.device) -> set[str]:
    """Give real, initialised fp32 memory to the modules that the source did not have; their
    names."""
    made = set()
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not any(tensor.is_meta for tensor in own):
            continue
        if not isinstance(module, nn.Linear | nn.LayerNorm):
            raise ConversionError(
                f"{type(model).__name__} needs {name} ({type(module).__name__}), which "
                "the source model does not have; load the checkpoint with headswap.load()."
            )
        module.to_empty(device=device, recurse=False)
        module.reset_parameters()  # some families leave their norms to torch
        if isinstance(module, nn.Linear):
            model._init_weights(module)
        made.add(name)
    return made


def _fill(model: Any, derived: DerivedHead) -> None:
    linear = model.get_submodule(model.head_spec.output.path)
    with torch.no_grad():
        linear.weight.copy_(derived.weight)
        if derived.bias is not None:
            linear.bias.copy_(derived.bias)
