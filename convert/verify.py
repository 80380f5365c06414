# SPDX-License-Identifier: Apache-2.0
"""Compares a converted model with its reference class, on the same ids.

Both run each row alone, and both run the rows as one batch. The reference's batch is padded on the
right, where every class of transformers is right; ours on either side. So each comparison is one
of like with like: a batch differs from its rows one by one by what rounding (and, in a few
families, the class's own convolutions) makes of another shape, and `spread` tells how much.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headswap.convert.conversion import text_field
from headswap.convert.decide import Options
from headswap.convert.job import Job, prepare
from headswap.convert.loading import check_tensors, read_class
from headswap.convert.merging import attach_adapter
from headswap.registry.errors import ConversionError

LENGTHS = (5, 11, 8, 3)
TOLERANCE = 1e-5
"""fp32 bound on a logit's difference, relative to 1 + the largest logit: sums in another order."""


@dataclass(frozen=True, slots=True)
class Case:
    """One way to feed the rows; `difference` is None where the model has no such input."""

    name: str
    difference: float | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The largest differences between a converted model and its reference class."""

    source: str
    reference: str
    scale: float
    cases: tuple[Case, ...]
    spread: float = 0.0
    """Largest difference of the reference's batch from its own rows, one by one."""
    tolerance: float = TOLERANCE
    independent: bool = True

    @property
    def ok(self) -> bool:
        """Whether every difference is within tolerance * (1 + the largest logit)."""
        bound = self.tolerance * (1 + self.scale)
        return all(c.difference is None or c.difference <= bound for c in self.cases)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {**asdict(self), "cases": [asdict(case) for case in self.cases], "ok": self.ok}


Row = tuple[list[int], list[int] | None]
Reference = Callable[[Sequence[Row]], Tensor]
"""Logits `[rows, labels]` of one batch, padded on the right."""


@torch.inference_mode()
def verify(path: Any, **options: Any) -> VerifyReport:
    """Run the reference class and ours on the same ids, in fp32; options as in `load`.

    The reference is transformers' own classification class where there is one, the causal class's
    token logits for label tokens, else the head's formula on what the causal class feeds its
    own output embedding. A head that transformers has nowhere is compared with itself alone and
    unpadded, and the report says so (`independent` is false). Raises `ConversionError` for an
    untrained head, which has nothing to be compared with, and whatever `load` raises.
    """
    if options.get("allow_untrained_head"):
        raise ConversionError("An untrained head is random; there is nothing to compare it with.")
    job = prepare(path, Options(**options))
    rows, pairs = sample_rows(job), sample_pairs(job)
    name, reference, independent = _reference(job)
    wanted = [_wanted(reference, part) for part in (rows, pairs) if part]
    del reference
    gc.collect()
    model = job.load(torch.float32).eval()
    cases = [Case("alone", _gap(_alone(model, rows), wanted[0].alone))]
    cases += _batched(model, "padded", rows, wanted[0].batch)
    if pairs:
        cases += _batched(model, "pairs, padded", pairs, wanted[1].batch)
    else:
        cases.append(Case("pairs", None, "the model has no segment ids"))
    return VerifyReport(
        job.checkpoint.name,
        name,
        scale=max(float(part.alone.abs().max()) for part in wanted),
        cases=tuple(cases),
        spread=max(_gap(part.batch, part.alone) for part in wanted),
        independent=independent,
    )


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The reference's logits `[rows, labels]`, row by row and as one batch."""

    alone: Tensor
    batch: Tensor


def _wanted(reference: Reference, rows: list[Row]) -> _Wanted:
    return _Wanted(torch.cat([reference([row]) for row in rows]).cpu(), reference(rows).cpu())


def _alone(model: Any, rows: list[Row]) -> Tensor:
    return torch.cat([run(model, [row], "right") for row in rows])


def _batched(model: Any, name: str, rows: list[Row], wanted: Tensor) -> list[Case]:
    return [Case(f"{name} {side}", _gap(run(model, rows, side), wanted))
            for side in ("right", "left")]  # fmt: skip


def _gap(found: Tensor, wanted: Tensor) -> float:
    return float((found.cpu() - wanted).abs().max())


def run(model: Any, rows: Sequence[Row], side: str) -> Tensor:
    """fp32 logits `[rows, labels]` of one padded batch."""
    inputs = {name: value.to(model.device) for name, value in batch(model.config, rows, side)}
    output = model(**inputs)
    logits: Tensor = output.pooler_output if "pooler_output" in output else output.logits
    return logits.float()


def batch(config: Any, rows: Sequence[Row], side: str = "right") -> Iterable[tuple[str, Tensor]]:
    """The named inputs `[rows, width]` of one batch, padded on `side`."""
    width = max(len(ids) for ids, _ in rows) + (3 if len(rows) > 1 else 0)
    pad = text_field(config, "pad_token_id") or 0

    def padded(values: list[int], fill: int) -> list[int]:
        rest = [fill] * (width - len(values))
        return rest + values if side == "left" else values + rest

    yield "input_ids", torch.tensor([padded(ids, pad) for ids, _ in rows])
    yield "attention_mask", torch.tensor([padded([1] * len(ids), 0) for ids, _ in rows])
    if rows[0][1] is not None:
        yield "token_type_ids", torch.tensor([padded(types or [], 0) for _, types in rows])


def sample_rows(job: Job, seed: int = 0) -> list[Row]:
    """Rows of fixed random ids, without the special ones, of `LENGTHS` tokens."""
    text = job.config.get_text_config()
    special = _special_ids(text)
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(0, text.vocab_size, (4 * sum(LENGTHS) + 64,), generator=generator)
    allowed = iter([i for i in draws.tolist() if i not in special])
    return [([next(allowed) for _ in range(length)], None) for length in LENGTHS]


def _special_ids(config: Any) -> set[int]:
    """Ids that a class gives a meaning, and 0, which pads where the config names no pad id."""
    names = ("pad", "bos", "eos", "sep", "cls")
    found = [getattr(config, f"{name}_token_id", None) for name in names]
    flat = [item for ids in found for item in (ids if isinstance(ids, list) else [ids])]
    return {0, *(item for item in flat if item is not None)}


def sample_pairs(job: Job) -> list[Row]:
    """The same ids cut in two segments; none for a model without a second segment."""
    if getattr(job.config.get_text_config(), "type_vocab_size", 0) < 2:
        return []
    rows = sample_rows(job, seed=1)
    return [(ids, [0] * (len(ids) // 2) + [1] * (len(ids) - len(ids) // 2)) for ids, _ in rows]


def _reference(job: Job) -> tuple[str, Reference, bool]:
    conversion = job.serving.cls.conversion
    if conversion.label_ids:
        return (*_token_logits(job), True)
    if job.serving.stock:
        return (*_native_logits(job), True)
    return _formula(job)


def _read(job: Job, cls: Any) -> Any:
    source, extra = job.source()
    model, info = read_class(cls, source, dtype=torch.float32, **extra)
    check_tensors(cls, job.checkpoint.name, info)
    text = model.config.get_text_config()
    if getattr(text, "pad_token_id", None) is None:
        text.pad_token_id = 0  # a score class refuses batches without one
    if job.checkpoint.adapter is not None:
        attach_adapter(model, job.checkpoint)  # unmerged: PEFT's own way to run it
    return model.eval()


def _native_logits(job: Job) -> tuple[str, Reference]:
    cls = job.serving.cls.source_class
    model = _read(job, cls)
    return cls.__name__, lambda rows: run(model, rows, "right")


def _last(states: Tensor, rows: Sequence[Row]) -> Tensor:
    """The state `[rows, width]` of each row's last token, pads standing on the right."""
    return states[torch.arange(len(rows)), torch.tensor([len(ids) - 1 for ids, _ in rows])]


def _token_logits(job: Job) -> tuple[str, Reference]:
    conversion = job.serving.cls.conversion
    cls = job.serving.cls.lm_class
    model = _read(job, cls)

    def reference(rows: Sequence[Row]) -> Tensor:
        return token_logits(model, rows, conversion)

    return f"{cls.__name__}'s own token logits", reference


def token_logits(lm: Any, rows: Sequence[Row], conversion: Any) -> Tensor:
    """fp32 logits `[rows, labels]` that the causal model `lm` itself gives to the label tokens."""
    states: Tensor = lm(**dict(batch(lm.config, rows))).logits
    logits = _last(states, rows)[:, list(conversion.label_ids)].float()
    return logits[:, 1:] - logits[:, :1] if conversion.method == "difference" else logits


def _formula(job: Job) -> tuple[str, Reference, bool]:
    """For classes that transformers has not: score weights times the state which the causal class
    feeds its output embedding; anything else is compared with itself, alone."""
    converted = job.load(torch.float32).eval()
    spec, entry = converted.head_spec, job.serving.resolution.entry
    if spec.family != "score" or entry.task != "generate" or spec.pooling != "last":
        return "the same model, alone", lambda rows: _alone(converted, list(rows)), False
    weight = converted.get_submodule(spec.output.path).weight.detach().clone()
    causal = entry.load()(converted.config).eval()
    setattr(causal, causal.base_model_prefix, converted.backbone)
    states: list[Tensor] = []
    causal.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: states.append(inputs[0])
    )

    def reference(rows: Sequence[Row]) -> Tensor:
        causal(**dict(batch(causal.config, rows)))
        return F.linear(_last(states.pop(), rows).float(), weight.float())

    return f"{entry.architecture}'s last hidden state times {spec.output.path}", reference, True
