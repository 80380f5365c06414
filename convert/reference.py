# SPDX-License-Identifier: Apache-2.0
"""What a converted model is compared with: transformers' own class, or the nearest thing to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from headswap.convert.classes import head_spec
from headswap.convert.conversion import text_field
from headswap.convert.job import Job
from headswap.convert.loading import check_tensors, read_class
from headswap.convert.merging import attach_adapter
from headswap.convert.model import require_head

SPARE = 3
"""Pads behind the longest row of a batch, so that each row has some."""
Row = tuple[list[int], list[int] | None]


class Wanted(NamedTuple):
    """fp32 logits `[rows, labels]`, and the largest number of which they are sums: rounding goes by
    that, where a logit is the difference of two large ones."""

    logits: Tensor
    size: float

    @classmethod
    def of(cls, logits: Tensor) -> Wanted:
        """Logits that are nobody's difference."""
        return cls(logits, float(logits.abs().max()))


Reference = Callable[[Sequence[Row]], Wanted]
"""Those of one batch, padded on the right."""


def reference_of(
    job: Job, dtype: torch.dtype = torch.float32, spare: int = SPARE
) -> tuple[str, Reference, bool]:
    """The reference of `verify`: its name, what runs it in `dtype`, and whether it is transformers'
    own arithmetic (not our model, alone)."""
    conversion = job.serving.cls.conversion
    if conversion.label_ids:
        return (*_token_logits(job, dtype, spare), True)
    if job.serving.stock:
        return (*_native_logits(job, dtype, spare), True)
    return _formula(job, dtype, spare)


def _read(job: Job, cls: Any, dtype: torch.dtype, head: Sequence[str] = ()) -> Any:
    source, extra = job.source()
    model, info = read_class(cls, source, dtype=dtype, **extra)
    absent = tuple(name for name in info.missing if name in head)
    if absent:
        require_head(absent, job.checkpoint.name, job.serving.cls)
    check_tensors(cls, job.checkpoint.name, info)
    text = model.config.get_text_config()
    if getattr(text, "pad_token_id", None) is None:
        text.pad_token_id = 0  # a score class refuses batches without one
    if job.checkpoint.adapter is not None:
        attach_adapter(model, job.checkpoint)  # unmerged: PEFT's own way to run it
    return model.eval()


def _native_logits(job: Job, dtype: torch.dtype, spare: int) -> tuple[str, Reference]:
    cls = job.serving.cls.source_class
    head = head_spec(job.serving.cls, job.serving.cls.conversion.apply(job.config)).tensors()
    model = _read(job, cls, dtype, head)
    return cls.__name__, lambda rows: Wanted.of(run(model, rows, "right", spare))


def _last(states: Tensor, rows: Sequence[Row]) -> Tensor:
    """The state `[rows, width]` of each row's last token, pads standing on the right."""
    return states[torch.arange(len(rows)), torch.tensor([len(ids) - 1 for ids, _ in rows])]


def _token_logits(job: Job, dtype: torch.dtype, spare: int) -> tuple[str, Reference]:
    conversion = job.serving.cls.conversion
    cls = job.serving.cls.lm_class
    model = _read(job, cls, dtype)

    def reference(rows: Sequence[Row]) -> Wanted:
        return token_logits(model, rows, conversion, spare)

    return f"{cls.__name__}'s own token logits", reference


def token_logits(lm: Any, rows: Sequence[Row], conversion: Any, spare: int = SPARE) -> Wanted:
    """The logits that the causal model `lm` itself gives to the label tokens."""
    states: Tensor = lm(**dict(batch(lm.config, rows, spare=spare))).logits
    logits = _last(states, rows)[:, list(conversion.label_ids)].float()
    own = Wanted.of(logits)
    if conversion.method == "difference":
        return own._replace(logits=logits[:, 1:] - logits[:, :1])
    return own


def _formula(job: Job, dtype: torch.dtype, spare: int) -> tuple[str, Reference, bool]:
    """For classes that transformers has not: score weights times the state which the causal class
    feeds its output embedding; anything else is compared with itself, alone."""
    converted = job.load(dtype).eval()
    spec, entry = converted.head_spec, job.serving.resolution.entry
    if spec.family != "score" or entry.task != "generate" or spec.pooling != "last":
        return "the same model, alone", lambda rows: Wanted.of(alone(converted, list(rows))), False
    weight = converted.get_submodule(spec.output.path).weight.detach().clone()
    causal = entry.load()(converted.config).eval().to(dtype)
    setattr(causal, causal.base_model_prefix, converted.backbone)
    states: list[Tensor] = []
    causal.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: states.append(inputs[0])
    )

    def reference(rows: Sequence[Row]) -> Wanted:
        causal(**dict(batch(causal.config, rows, spare=spare)))
        return Wanted.of(F.linear(_last(states.pop(), rows).float(), weight.float()))

    return f"{entry.architecture}'s last hidden state times {spec.output.path}", reference, True


def run(model: Any, rows: Sequence[Row], side: str, spare: int = SPARE) -> Tensor:
    """fp32 logits `[rows, labels]` of one padded batch."""
    named = batch(model.config, rows, side, spare)
    inputs = {name: value.to(model.device) for name, value in named}
    output = model(**inputs)
    logits: Tensor = output.pooler_output if "pooler_output" in output else output.logits
    return logits.float()


def batch(
    config: Any, rows: Sequence[Row], side: str = "right", spare: int = SPARE
) -> Iterable[tuple[str, Tensor]]:
    """The named inputs `[rows, width]` of one batch, padded on `side`; of several rows the longest
    has `spare` pads too."""
    width = max(len(ids) for ids, _ in rows) + (spare if len(rows) > 1 else 0)
    pad = text_field(config, "pad_token_id") or 0

    def padded(values: list[int], fill: int) -> list[int]:
        rest = [fill] * (width - len(values))
        return rest + values if side == "left" else values + rest

    yield "input_ids", torch.tensor([padded(ids, pad) for ids, _ in rows])
    yield "attention_mask", torch.tensor([padded([1] * len(ids), 0) for ids, _ in rows])
    if rows[0][1] is not None:
        yield "token_type_ids", torch.tensor([padded(types or [], 0) for _, types in rows])


def alone(model: Any, rows: list[Row]) -> Tensor:
    return torch.cat([run(model, [row], "right") for row in rows])
