# SPDX-License-Identifier: Apache-2.0
"""Puts a PEFT adapter on a loaded model and merges it. PEFT does the arithmetic; here every one of
the adapter's tensors is accounted for, and what PEFT merged is compared with what it ran."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headswap.convert.adapter import CONFIG, Adapter
from headswap.convert.backbone import backbone_name
from headswap.convert.checkpoint import Checkpoint
from headswap.convert.conversion import text_field
from headswap.convert.derive import probe_ids
from headswap.convert.loading import meta_state
from headswap.convert.plan import Action, TensorPlan
from headswap.registry.errors import CheckpointError, ConversionError, WeightError

_PREFIX = "base_model.model."
_HEADS = ("classifier", "score")
"""Modules that PEFT trains whole in a classifier, listed in the adapter's config or not."""
_REFUSALS = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError,
             ValueError)  # fmt: skip
_TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-4}
"""Largest difference, relative to the largest output, that rounding explains; else 5e-2."""


def merge_adapter(model: Any, checkpoint: Checkpoint) -> Any:
    """`model` with the checkpoint's adapter merged into its weights, in eval mode.

    Raises `WeightError` naming tensors that have no place or are not there, `CheckpointError`
    where peft is not installed or older than the adapter, and `ConversionError` for a method that
    can't be merged, or whose merged weights don't give what the adapter gives beside them.
    """
    adapter = _of(checkpoint)
    embeddings = model.get_input_embeddings(), model.get_output_embeddings()
    tuner = attach_adapter(model, checkpoint)
    wanted = _probe(model)
    _untie(model, embeddings)
    try:
        merged = tuner.merge_and_unload(safe_merge=True)
    except _REFUSALS as error:
        raise ConversionError(f"{checkpoint.name} can't be merged by peft: {error}") from error
    difference = float((_probe(merged) - wanted).abs().max())
    bound = _TOLERANCES.get(merged.dtype, 5e-2) * (1.0 + float(wanted.abs().max()))
    if not difference <= bound:
        raise ConversionError(
            f"{checkpoint.name}: the merged weights give outputs that differ by {difference:.3g} "
            f"from those of the {adapter.kind} adapter beside its base, so it can't be merged "
            "exactly.",
            difference=difference,
        )
    # It is no longer what that name names: an adapter trained on it must not be put on the base.
    merged.name_or_path = merged.config._name_or_path = ""
    return merged.requires_grad_(True).eval()


def attach_adapter(model: Any, checkpoint: Checkpoint) -> Any:
    """Put PEFT's layers, with the adapter's tensors, into `model` itself; returns PEFT's tuner."""
    adapter, names = _of(checkpoint), _names(model, checkpoint)
    meta = model.device.type == "meta"
    stored = meta_state(dict(adapter.headers)) if meta else adapter.read()
    state = {_PREFIX + plain: stored[name] for name, plain in names.items()}
    strays = [name for name, plain in names.items() if not _has_module(model, plain)]
    config = _config(adapter, moved=list(names.values()) != list(adapter.names.values()))
    if meta and hasattr(config, "init_lora_weights"):
        config.init_lora_weights = False  # some are computed from the base's numbers
    try:
        wrapped, loaded = _wrap(model, config, state, meta)
    except _REFUSALS as error:
        raise _misfit(checkpoint, model, strays, str(error)) from error
    unexpected = {name.replace(".default", "") for name in loaded.unexpected_keys}
    strays = [name for name, plain in names.items() if _PREFIX + plain in unexpected] or strays
    missing = _lacking(wrapped, loaded.missing_keys, adapter)
    if loaded.unexpected_keys or missing:
        lacks = f"it lacks {missing[0]} ({len(missing)} such)" if missing else ""
        raise _misfit(checkpoint, model, strays or list(loaded.unexpected_keys), lacks, missing)
    return wrapped.base_model


def _of(checkpoint: Checkpoint) -> Adapter:
    if checkpoint.adapter is None:
        raise ConversionError(f"{checkpoint.name} has no adapter to put on a model.")
    return checkpoint.adapter


def _wrap(model: Any, config: Any, state: Mapping[str, Tensor], meta: bool) -> tuple[Any, Any]:
    peft = _peft()
    wrapped = peft.get_peft_model(model, config, low_cpu_mem_usage=meta)
    loaded = peft.set_peft_model_state_dict(wrapped, dict(state), low_cpu_mem_usage=meta)
    return wrapped.eval(), loaded


def account_adapter(model: Any, checkpoint: Checkpoint) -> list[TensorPlan]:
    """What becomes of every tensor of the adapter, found by putting it on `model`, whose tensors
    are on the meta device."""
    if checkpoint.adapter is None:
        return []
    try:
        attach_adapter(model, checkpoint)
        stray: Mapping[str, str] = {}
        lacking: list[TensorPlan] = []
    except WeightError as error:
        stray = dict.fromkeys(error.unexpected, "no place for it")
        lacking = [TensorPlan(name, "missing", (), "not in the adapter") for name in error.missing]
        if not stray and not lacking:
            lacking = [TensorPlan(checkpoint.adapter.kind, "missing", (), str(error))]
    return [*_accounted(checkpoint.adapter, stray), *lacking]


def _accounted(adapter: Adapter, stray: Mapping[str, str]) -> Iterator[TensorPlan]:
    for name, (shape, _) in sorted(adapter.headers.items()):
        if name not in adapter.names:
            first = adapter.copies.get(name)
            why = f"{first} again" if first else "the base's copy of a trained module"
            yield TensorPlan(name, "dropped", shape, why)
        else:
            action: Action = "unexpected" if name in stray else "used"
            yield TensorPlan(name, action, shape, stray.get(name, ""))


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise CheckpointError(
            "An adapter needs peft; install it with: pip install 'headswap[peft]'"
        ) from error
    return peft


def _config(adapter: Adapter, moved: bool) -> Any:
    """The adapter's own PEFT config, for a plain PEFT model: which class the model has is decided
    already. `moved` says that it was trained on the bare backbone."""
    try:
        config = _peft().PeftConfig.from_pretrained(str(adapter.folder))
    except _REFUSALS as error:
        raise CheckpointError(
            f"{adapter.folder / CONFIG} can't be read by peft: {error}", path=str(adapter.folder)
        ) from error
    known = {field.name for field in dataclasses.fields(config)}
    unknown = [name for name, value in adapter.raw.items() if value and name not in known]
    if unknown:
        raise CheckpointError(
            f"{adapter.folder / CONFIG} sets {', '.join(unknown)}, which the installed peft does "
            "not know and would leave out; install a newer one.",
            path=str(adapter.folder),
        )
    if config.is_prompt_learning or getattr(config, "alora_invocation_tokens", None):
        raise ConversionError(
            f"{adapter.folder} is a {adapter.kind} adapter that acts on the input and can't be "
            "merged into weights; load the base, and put it on with peft's PeftModel."
        )
    if adapter.task in ("classify", "token-classify"):
        config.modules_to_save = [*(config.modules_to_save or ()), *_HEADS]
    if moved and isinstance(getattr(config, "target_modules", None), str):
        config.target_modules = rf"(?:.*\.)?(?:{config.target_modules})"
    config.task_type, config.inference_mode, config.base_model_name_or_path = None, True, None
    return config


def _names(model: Any, checkpoint: Checkpoint) -> dict[str, str]:
    """Stored name -> name in `model`: a head under its own path, and the backbone's prefix before
    names of an adapter that was trained on the bare backbone."""
    prefix = backbone_name(getattr(type(model), "source_class", type(model)))
    backbone = getattr(model, prefix, None)
    outside = {name for name, _ in model.named_children()}
    inside = {name for name, _ in backbone.named_children()} if backbone is not None else set()
    names = {}
    for stored, plain in _of(checkpoint).names.items():
        first = plain.partition(".")[0]
        bare = first in inside and first not in outside
        names[stored] = f"{prefix}.{plain}" if bare else plain
    return names | {stored: name for name, stored in checkpoint.adapter_head.items()}


def _has_module(model: nn.Module, name: str) -> bool:
    """Whether the module that tensor `name` belongs to is in `model`: all but the last two parts
    must be there (`q_proj.lora_A.weight`), and the last but two of a module's own tensor."""
    *path, _ = name.split(".")
    here: Any = model
    for depth, part in enumerate(path):
        inner = here._modules.get(part) if isinstance(here, nn.Module) else None
        if inner is None:
            return depth > 0 and not isinstance(here, nn.ModuleList) and len(path) - depth <= 2
        here = inner
    return True


def _untie(model: Any, tied: tuple[Any, Any]) -> None:
    """Give a tied output embedding its own memory where the adapter changes it or the input one:
    merging into one would change the other as well.

    `tied` are the input and the output embedding as they were before PEFT wrapped them.
    """
    inner, outer = tied
    now = model.get_input_embeddings(), model.get_output_embeddings()
    if outer is not None and outer.weight is inner.weight and now != tied:
        outer.weight = nn.Parameter(inner.weight.detach().clone(), requires_grad=False)


def _lacking(wrapped: Any, missing: list[str], adapter: Adapter) -> list[str]:
    """Names in PEFT's model of what the adapter should have held; not those that are another name
    of a tensor that was loaded."""
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

    prefixes = {str(kind.value): prefix for kind, prefix in PEFT_TYPE_TO_PREFIX_MAPPING.items()}
    own = (f".{prefixes.get(adapter.kind, adapter.kind)}", ".trainable_tokens_")
    absent = [n for n in missing if any(part in n for part in own) and ".default" in n]
    tensors = dict(wrapped.named_parameters(remove_duplicate=False)) if absent else {}
    loaded = {id(tensor) for name, tensor in tensors.items() if name not in missing}
    return [name for name in absent if id(tensors.get(name)) not in loaded]


def _misfit(
    checkpoint: Checkpoint,
    model: Any,
    strays: list[str],
    why: str,
    missing: list[str] | None = None,
) -> WeightError:
    parts = [f"The adapter {_of(checkpoint).folder} does not fit {type(model).__name__}"]
    if strays:
        more = f" and {len(strays) - 4} more" if len(strays) > 4 else ""
        parts.append(f"no place for {', '.join(strays[:4])}{more}")
    if why:
        parts.append(why)
    advice = "Check that this is the base it was trained on" + (
        ", or give label_tokens, which read the language model's head."
        if any("lm_head" in name for name in strays) else "."
    )  # fmt: skip
    return WeightError(f"{'; '.join(parts)}. {advice}", missing=tuple(missing or ()),
                       unexpected=tuple(strays))  # fmt: skip


@torch.no_grad()
def _probe(model: Any) -> Tensor:
    """What `model` gives for fixed ids, with an end mark for those that pool it."""
    ids = probe_ids(model.config.get_text_config().vocab_size, model.device)
    end = text_field(model.config, "eos_token_id")
    if isinstance(end, int):
        ids = torch.cat([ids, ids.new_tensor([[end]])], dim=1)
    found = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids))
    output: Tensor = found.pooler_output if "pooler_output" in found else found.logits
    return output.float()
