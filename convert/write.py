# SPDX-License-Identifier: Apache-2.0
"""Writes a converted checkpoint: beside the target, checked there, then renamed into place."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headswap.convert.beside import checked_target, written_beside
from headswap.convert.checkpoint import TOKENIZER_FILES, Checkpoint
from headswap.convert.conversion import INEXACT, marks, text_field
from headswap.convert.decide import Options
from headswap.convert.gguf import save_tokenizer
from headswap.convert.job import Job, prepare
from headswap.convert.plan import ConversionPlan, ConversionReport
from headswap.convert.reference import Wanted, run
from headswap.convert.rotation import write_rotation
from headswap.convert.stream import Stream, obstacle, stream, write_stream
from headswap.convert.stream_check import wanted_logits, written_logits
from headswap.convert.verify import TOLERANCE, sample_rows
from headswap.registry.errors import ConversionError, UnsupportedHeadError


def convert_checkpoint(
    path: Any, out: Any, *, dtype: torch.dtype | None = None, **options: Any
) -> ConversionReport:
    """Convert the checkpoint at `path` into the folder `out`; options as in `load`.

    The result loads in stock transformers where it has such a class (`report.stock`). `dtype` is
    the backbone's on disk (default: as stored); the head is kept in fp32. `out` must
    not exist, or be an empty folder; it appears complete and checked, or not at all.

    Raises `CheckpointError` for a target in the way, `UnsupportedHeadError` for a head which
    a stock checkpoint cannot express, `ConversionError` if the written checkpoint does not give the
    same logits, and whatever `load` raises.
    """
    target = checked_target(out)
    job = prepare(path, Options(**options))
    if job.serving.cls.conversion.task == "embed":
        raise ConversionError(
            "An embedder has no head to store; its checkpoint is the one that you have."
        )
    plan = job.plan()
    reason, made, wanted = _streamed(job, plan, dtype)
    if made is None or wanted is None:
        return _over_a_model(job, plan, target, dtype, reason)
    notes = (*plan.notes, *_prepare_config(job, made.config))
    with written_beside(target) as folder:
        write_stream(made, folder)
        made.config.save_pretrained(folder)
        write_rotation(folder)
        _copy_tokenizer(job, folder)
        with torch.inference_mode():
            parity = _difference(written_logits(job, folder), wanted)
    return _report(job, plan, target, parity, notes)


def _streamed(
    job: Job, plan: ConversionPlan, dtype: torch.dtype | None
) -> tuple[str, Stream | None, Wanted | None]:
    """The conversion as a copy, and the logits it must give; without them, why it can't be one."""
    reason = obstacle(job, dtype) or ("" if plan.ok else "the plan has problems")
    made = None if reason else stream(job)
    if made is None:
        return reason or "loading renames or changes its tensors", None, None
    try:
        with torch.inference_mode():
            return "", made, wanted_logits(job, made)
    except (KeyError, NotImplementedError, RuntimeError, ValueError) as error:
        return f"its layers do not run one by one ({type(error).__name__})", None, None


def _over_a_model(
    job: Job, plan: ConversionPlan, target: Path, dtype: torch.dtype | None, reason: str
) -> ConversionReport:
    """The conversion by loading the whole model and saving it."""
    model = job.load(dtype or stored_dtype(job.checkpoint))
    _refuse_inexact(job, model)
    notes = [
        *plan.notes,
        f"the whole model was loaded: {reason}",
        *_pad_for_stock(job, model.config),
    ]
    with written_beside(target) as folder:
        model.save_pretrained(folder)
        write_rotation(folder)
        _copy_tokenizer(job, folder)
        parity = _parity(job, model, folder)
    return _report(job, plan, target, parity, tuple(notes))


def _prepare_config(job: Job, config: Any) -> list[str]:
    """What `save_pretrained` of a model would write into its config."""
    config.architectures = [job.serving.cls.__name__]
    config.dtype = stored_dtype(job.checkpoint)
    if job.pad_id is not None:
        config.get_text_config().pad_token_id = job.pad_id
    return _pad_for_stock(job, config)


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype that most stored numbers have; fp32 for GGUF, which is dequantised."""
    sizes: Counter[torch.dtype] = Counter()
    for shape, dtype in checkpoint.headers.values():
        if dtype.is_floating_point:
            sizes[dtype] += torch.Size(shape).numel()
    return sizes.most_common(1)[0][0] if sizes else torch.float32


def _refuse_inexact(job: Job, model: Any) -> None:
    for field, what in INEXACT.items():
        if marks(model.config).get(field):
            raise UnsupportedHeadError(
                f"{job.checkpoint.name} has {what}, which a stock classification checkpoint cannot "
                "express, so it would load with other scores. headswap.load(...) serves it "
                "exactly, and save_pretrained() of that model keeps it for headswap.",
                field=field,
            )


def _pad_for_stock(job: Job, config: Any) -> list[str]:
    """Give a stock score head the pad id without which it refuses batches."""
    if not job.serving.stock or text_field(config, "pad_token_id") is not None:
        return []
    eos = text_field(config, "eos_token_id")
    eos = eos[0] if isinstance(eos, list) else eos
    if eos is None:
        return ["no pad_token_id: stock transformers takes batches of one only"]
    config.get_text_config().pad_token_id = eos
    return [f"pad_token_id set to the end mark {eos}, since neither config nor tokenizer has one"]


def _copy_tokenizer(job: Job, folder: Path) -> None:
    if job.checkpoint.gguf_file:
        save_tokenizer(job.checkpoint.tokenizer(), folder)
        return
    for name in TOKENIZER_FILES:
        file = job.checkpoint.tokenizer_folder / name
        if file.exists():
            shutil.copyfile(file, folder / name)


@torch.inference_mode()
def _parity(job: Job, model: Any, folder: Path) -> float:
    """Largest difference between the model and what the written folder gives, in fp32."""
    rows = sample_rows(job)
    reread = _reread(job, folder)
    batched = text_field(reread.config, "pad_token_id") is not None
    batches = [rows] if batched else [[row] for row in rows]
    if model.dtype != torch.float32:
        # Not model.float(): some families keep a constant that was rounded when they were built
        # (Gemma's embedding scale), and what is read again in fp32 has it exact.
        rounded, model = model.state_dict(), job.load(torch.float32)
        model.load_state_dict(rounded)
    found = torch.cat([run(reread, batch, "right") for batch in batches])
    wanted = torch.cat([run(model, batch, "right") for batch in batches])
    return _difference(found, Wanted.of(wanted))


def _difference(found: Tensor, wanted: Wanted) -> float:
    """The largest difference; `ConversionError` where rounding does not explain it."""
    difference = float((found - wanted.logits).abs().max())
    if not difference <= TOLERANCE * (1 + wanted.size):
        raise ConversionError(
            f"The written checkpoint gives logits that differ by {difference:.3g} from the "
            "model's; it was removed. This is a defect in headswap or in the checkpoint's class.",
            difference=difference,
        )
    return difference


def _reread(job: Job, folder: Path) -> Any:
    cls = job.serving.cls
    if job.serving.stock:
        return cls.source_class.from_pretrained(str(folder), dtype=torch.float32).eval()
    untrained = job.options.allow_untrained_head
    again = prepare(folder, Options(task=cls.conversion.task, allow_untrained_head=untrained))
    return again.load(torch.float32)


def _report(
    job: Job, plan: ConversionPlan, target: Path, parity: float, notes: tuple[str, ...]
) -> ConversionReport:
    def named(action: str) -> tuple[str, ...]:
        return tuple(t.name for t in plan.tensors if t.action == action)

    return ConversionReport(
        source=job.checkpoint.name,
        target=str(target),
        architecture=job.serving.cls.__name__,
        used=named("used"),
        renamed=named("renamed"),
        derived=named("derived"),
        dropped={t.name: t.reason for t in plan.tensors if t.action == "dropped"},
        labels=plan.labels,
        stock=job.serving.stock,
        parity=parity,
        notes=notes,
    )
