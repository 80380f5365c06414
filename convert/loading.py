# SPDX-License-Identifier: Apache-2.0
"""Strict loading: transformers reads the tensors, and every one of them is accounted for."""

from __future__ import annotations

import contextlib
import copy
import difflib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from headswap.convert.bidirectional import check_bidirectional
from headswap.convert.checkpoint import open_checkpoint
from headswap.convert.classes import head_spec
from headswap.convert.conversion import mark
from headswap.convert.drops import drop_reason
from headswap.convert.model import require_head
from headswap.convert.parallel import settle
from headswap.convert.quantised import forget_settings, settings_of
from headswap.convert.rotation import is_foreign, read_rotation
from headswap.convert.weights import read_json
from headswap.heads import Norm
from headswap.registry.errors import (
    CheckpointError,
    ConversionError,
    HeadswapError,
    WeightError,
)


@dataclass(frozen=True, slots=True)
class LoadingInfo:
    """What the loader said: names of tensors, sorted."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[tuple[str, Any, Any], ...]


def read_class(cls: Any, path: Any, *args: Any, **kwargs: Any) -> tuple[Any, LoadingInfo]:
    """transformers' own `from_pretrained` of `cls`, and what it found; judges nothing."""
    with _quiet_loader(), _named_faults(cls, path):
        load: Any = PreTrainedModel.from_pretrained  # ours overrides it in converted classes
        model, info = load.__func__(
            cls, path, *args, output_loading_info=True, ignore_mismatched_sizes=True,
            **kwargs, **_unpacked(kwargs),
        )  # fmt: skip
    if "gguf_file" in kwargs:
        _forget_packing(model)
    _forget_renaming(model, kwargs.get("key_mapping") or {})
    mismatched = sorted(_misshapen(item, model) for item in info["mismatched_keys"])
    missing = set(info["missing_keys"]) - {name for name, _, _ in mismatched}
    return model, LoadingInfo(
        tuple(sorted(missing)), tuple(sorted(info["unexpected_keys"])), tuple(mismatched)
    )


def _misshapen(item: Any, model: Any) -> tuple[str, Any, Any]:
    """Name, stored shape (None where the release does not say it, 4.57) and the needed one."""
    if isinstance(item, str):
        return item, None, tuple(model.state_dict()[item].shape)
    name, stored, needed = item
    return name, tuple(stored), tuple(needed)


@contextlib.contextmanager
def _named_faults(cls: Any, path: Any) -> Iterator[None]:
    """Say which checkpoint and class it was where torch refuses a size or an id of a config."""
    try:
        yield
    except HeadswapError:
        raise
    except ValueError as error:
        if "is corrupted" not in str(error):  # 4.57, of names that the class has none of
            raise
        raise WeightError(
            f"{path or 'The checkpoint'} does not fit {cls.__name__}: hardly one of its tensors "
            "has a name that the class has. Check that config.json belongs to these weights, or "
            "describe the renaming with headswap.register_weight_rule().",
            missing=(),
            unexpected=(),
        ) from error
    except (ArithmeticError, AssertionError, RuntimeError) as error:
        raise CheckpointError(
            f"{path or 'The checkpoint'} can't be loaded as {cls.__name__}: {error}. Check the "
            "sizes and pad_token_id in config.json, and the memory at hand.",
            path=str(path),
        ) from error


def _unpacked(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Have a GGUF file's blocks unpacked, so that the numbers don't depend on kernels at hand."""
    config = getattr(transformers, "GgufConfig", None)  # from 5.24 on; older releases always unpack
    return (
        {"quantization_config": config(dequantize=True)} if "gguf_file" in kwargs and config else {}
    )


def _forget_renaming(model: Any, ours: Mapping[str, str]) -> None:
    """transformers 5 would undo the renamings that were asked for when it saves; the tensors are
    saved under the class's own names."""
    made = getattr(model, "_weight_conversions", None)
    if made and ours:
        targets = set(ours.values())
        model._weight_conversions = [x for x in made if set(x.target_patterns) - targets]


def _forget_packing(model: Any) -> None:
    """The weights are plain now; the loader's mark would forbid training and saving them."""
    model.__dict__.pop("hf_quantizer", None)
    for config in (model.config, model.config.get_text_config()):
        if hasattr(config, "quantization_config"):
            del config.quantization_config


def load_class(cls: Any, path: Any, *args: Any, allow_untrained_head: bool, **kwargs: Any) -> Any:
    """What `ConvertedModel.from_pretrained` does; see there."""
    wants_info = kwargs.pop("output_loading_info", False)
    # Tensors that were read already come without a path; their config knows its folder.
    name = path or getattr(kwargs.get("config"), "name_or_path", None) or "The checkpoint"
    path, kwargs = plain_source(cls, path, kwargs)
    adapt = kwargs.pop("adapt", None)  # merges an adapter into what was loaded
    if cls.conversion.label_ids:
        from headswap.convert.share import convert_model

        lm, info = read_class(cls.lm_class, path, *args, **kwargs)
        check_tensors(cls.lm_class, name, info)
        model = convert_model(adapt(lm) if adapt else lm, cls).eval()
    else:
        model, info = read_class(cls, path, *args, **kwargs)
        check_head(model, name, info, allow_untrained_head)
        model = adapt(model) if adapt else model
        check_bidirectional(model)
    return (model, vars_of(info)) if wants_info else model


def plain_source(cls: Any, path: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """`path` and `kwargs` for transformers' loader that keep a head plain: a folder with quantised
    weights is read as plain ones, a rotation that the installed release would pass over is read,
    and quantisation that the caller asks for leaves the head out."""
    asked = kwargs.get("quantization_config")
    if asked is not None:
        return path, {**kwargs, "quantization_config": _sparing_head(cls, asked, path, kwargs)}
    given = {"state_dict", "gguf_file"} & kwargs.keys()
    if given or path is None or not Path(path, "config.json").exists():
        return path, kwargs
    raw = read_json(Path(path, "config.json"))
    plain = settings_of(raw) is None
    if plain and (not is_foreign(raw) or "config" in kwargs):
        return path, kwargs
    config, rest = kwargs.get("config"), {k: v for k, v in kwargs.items() if k != "config"}
    if config is None:
        config, rest = cls.config_class.from_pretrained(path, return_unused_kwargs=True, **rest)
        config = read_rotation(config, raw, str(path))
    if plain:
        return path, {**rest, "config": config}
    checkpoint = open_checkpoint(path, trust_remote_code=bool(kwargs.get("trust_remote_code")))
    forget_settings(config)
    return None, {**rest, "config": config, "state_dict": checkpoint.tensors()}


def _sparing_head(cls: Any, asked: Any, path: Any, kwargs: dict[str, Any]) -> Any:
    """A copy of a quantisation config that leaves the modules of `cls`'s head plain."""
    if cls.conversion.label_ids or cls.conversion.task == "embed":
        return asked  # transformers leaves a language model's output rows plain
    config = kwargs.get("config") or cls.config_class.from_pretrained(path)
    head = [layer.path for layer in head_spec(cls, cls.conversion.apply(config)).stored]
    asked = copy.deepcopy(asked)
    for field in ("modules_to_not_convert", "llm_int8_skip_modules"):
        if hasattr(asked, field):
            setattr(asked, field, [*(getattr(asked, field) or []), *head])
    return asked


def vars_of(info: LoadingInfo) -> dict[str, Any]:
    """The loading info in transformers' words."""
    return {
        "missing_keys": set(info.missing),
        "unexpected_keys": set(info.unexpected),
        "mismatched_keys": set(info.mismatched),
        "error_msgs": [],
    }


def check_head(model: Any, path: Any, info: LoadingInfo, allow_untrained: bool) -> None:
    """Refuse a missing head unless allowed (the model is then marked), and any other fault."""
    head = set(model.head_spec.tensors())
    absent = tuple(name for name in info.missing if name in head)
    others = tuple(name for name in info.missing if name not in head)
    check_tensors(type(model), path, LoadingInfo(others, info.unexpected, info.mismatched))
    if absent and not allow_untrained:
        require_head(absent, path, type(model))
    if absent:
        _reset_norms(model, absent)
        settle(model)
        mark(model.config, untrained_head=list(absent))


def _reset_norms(model: Any, absent: tuple[str, ...]) -> None:
    """Give ones to the norms of a missing head, which the loader does not initialise."""
    for layer in model.head_spec.stored:
        if isinstance(layer, Norm) and f"{layer.path}.weight" in absent:
            model.get_submodule(layer.path).reset_parameters()


def check_tensors(cls: type, path: Any, info: LoadingInfo) -> None:
    """Raise `WeightError` for a missing, misshapen or unexplained tensor."""
    if info.mismatched:
        name, stored, needed = info.mismatched[0]
        raise WeightError(
            f"{path}: {name} has {'another shape' if stored is None else f'shape {list(stored)}'}, "
            f"but {cls.__name__} needs {list(needed)} "
            f"({len(info.mismatched)} such). Check num_labels, id2label and the config's sizes.",
            missing=(),
            unexpected=tuple(name for name, _, _ in info.mismatched),
        )
    stray = tuple(name for name in info.unexpected if drop_reason(name, cls) is None)
    if info.missing or stray:
        raise WeightError(_account(cls, path, info.missing, stray), missing=info.missing,
                          unexpected=stray)  # fmt: skip


def _account(cls: type, path: Any, missing: tuple[str, ...], stray: tuple[str, ...]) -> str:
    parts = [f"{path} does not fit {cls.__name__}:"]
    if missing:
        near = difflib.get_close_matches(missing[0], stray, n=1)
        hint = f"; nearest stored: {near[0]}" if near else ""
        parts.append(f"missing {_some(missing)}{hint}.")
    if stray:
        parts.append(f"No place for {_some(stray)}.")
    parts.append(
        "Check that config.json belongs to these weights, ask for another head with head=, or "
        "describe the renaming with headswap.register_weight_rule()."
    )
    return " ".join(parts)


def _some(names: tuple[str, ...], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


@contextlib.contextmanager
def _quiet_loader() -> Iterator[None]:
    """Hold back the loader's own report on missing and unexpected tensors: ours replaces it."""

    def keep(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return "LOAD REPORT" not in text and "Some weights of" not in text

    loggers = [logging.getLogger(f"transformers.{name}") for name in
               ("modeling_utils", "core_model_loading", "utils.loading_report")]  # fmt: skip
    for logger in loggers:
        logger.addFilter(keep)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(keep)


def check_place(dtype: Any, device: Any) -> None:
    """`ConversionError` for a dtype that no backbone runs in, or a device that is not here."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConversionError(
            f"dtype={dtype!r}; pass a floating torch dtype such as torch.bfloat16.", option="dtype"
        )
    try:
        torch.empty(0, device=device)
    except Exception as error:  # torch raises what its backends raise
        raise ConversionError(
            f"device={device!r} can't be used: {error}", option="device"
        ) from error


def head_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The parameters of `model`'s head, by name."""
    names = () if model.conversion.task == "embed" else model.head_spec.tensors()
    return {name: model.get_parameter(name).detach() for name in names}


def meta_state(headers: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, torch.Tensor]:
    """Tensors without data from stored shapes and dtypes."""
    return {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, (shape, dtype) in headers.items()
    }
