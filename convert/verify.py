# SPDX-License-Identifier: Apache-2.0
"""Compares a converted model with its reference class, on the same ids.

The reference runs each row alone and unpadded, where every class of transformers is right; the
converted model runs the same rows alone, padded on either side, and as pairs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headswap.convert.conversion import text_field
from headswap.convert.decide import Options
from headswap.convert.job import Job, prepare
from headswap.convert.loading import check_tensors, read_class
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
Reference = Callable[[Row], Tensor]


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
    rows = sample_rows(job)
    pairs = sample_pairs(job)
    name, reference, independent = _reference(job)
    wanted = [reference(row) for row in (*rows, *pairs)]
    del reference
    gc.collect()
    model = job.load(torch.float32).eval()
    found = compare(job.checkpoint.name, name, model, rows, pairs, wanted)
    return replace(found, independent=independent)


def compare(
    source: str, name: str, model: Any, rows: list[Row], pairs: list[Row], wanted: list[Tensor]
) -> VerifyReport:
    """The differences of `model` from the `wanted` logits of `rows` and then `pairs`."""
    split = len(rows)
    alone = torch.cat([run(model, [row], "right") for row in rows])
    cases = [Case("alone", _gap(alone, wanted[:split]))]
    for side in ("right", "left"):
        cases.append(Case(f"padded {side}", _gap(run(model, rows, side), wanted[:split])))
    if pairs:
        for side in ("right", "left"):
            cases.append(Case(f"pairs, padded {side}", _gap(run(model, pairs, side),
                                                            wanted[split:])))  # fmt: skip
    else:
        cases.append(Case("pairs", None, "the model has no segment ids"))
    scale = max(float(logits.abs().max()) for logits in wanted)
    return VerifyReport(source, name, scale, tuple(cases))


def _gap(found: Tensor, wanted: Sequence[Tensor]) -> float:
    return float((found.cpu() - torch.cat(list(wanted))).abs().max())


def run(model: Any, rows: Sequence[Row], side: str) -> Tensor:
    """fp32 logits `[rows, labels]` of one padded batch."""
    width = max(len(ids) for ids, _ in rows) + (3 if len(rows) > 1 else 0)
    pad = text_field(model.config, "pad_token_id") or 0

    def padded(values: list[int], fill: int) -> list[int]:
        rest = [fill] * (width - len(values))
        return rest + values if side == "left" else values + rest

    inputs = {
        "input_ids": torch.tensor([padded(ids, pad) for ids, _ in rows]),
        "attention_mask": torch.tensor([padded([1] * len(ids), 0) for ids, _ in rows]),
    }
    if rows[0][1] is not None:
        inputs["token_type_ids"] = torch.tensor([padded(types or [], 0) for _, types in rows])
    inputs = {name: value.to(model.device) for name, value in inputs.items()}
    output = model(**inputs)
    logits: Tensor = output.pooler_output if "pooler_output" in output else output.logits
    return logits.float()


def sample_rows(job: Job, seed: int = 0) -> list[Row]:
    """Rows of fixed random ids, without the special ones, of `LENGTHS` tokens."""
    text = job.config.get_text_config()
    special = _special_ids(text)
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(0, text.vocab_size, (4 * sum(LENGTHS) + 64,), generator=generator)
    allowed = iter([i for i in draws.tolist() if i not in special])
    return [([next(allowed) for _ in range(length)], None) for length in LENGTHS]


def _special_ids(config: Any) -> set[int]:
    names = ("pad", "bos", "eos", "sep", "cls")
    found = [getattr(config, f"{name}_token_id", None) for name in names]
    flat = [item for ids in found for item in (ids if isinstance(ids, list) else [ids])]
    return {item for item in flat if item is not None}


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
    return model.eval()


def _tensors(row: Row) -> dict[str, Tensor]:
    ids, types = row
    inputs = {"input_ids": torch.tensor([ids])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    return inputs if types is None else {**inputs, "token_type_ids": torch.tensor([types])}


def _native_logits(job: Job) -> tuple[str, Reference]:
    cls = job.serving.cls.source_class
    model = _read(job, cls)
    return cls.__name__, lambda row: model(**_tensors(row)).logits.float()


def _token_logits(job: Job) -> tuple[str, Reference]:
    conversion = job.serving.cls.conversion
    cls = job.serving.cls.lm_class
    model = _read(job, cls)

    def reference(row: Row) -> Tensor:
        logits: Tensor = model(**_tensors(row)).logits[:, -1, list(conversion.label_ids)].float()
        return logits[:, 1:] - logits[:, :1] if conversion.method == "difference" else logits

    return f"{cls.__name__}'s own token logits", reference


def _formula(job: Job) -> tuple[str, Reference, bool]:
    """For classes that transformers has not: score weights times the state which the causal class
    feeds its output embedding; anything else is compared with itself, alone."""
    converted = job.load(torch.float32).eval()
    spec, entry = converted.head_spec, job.serving.resolution.entry
    if spec.family != "score" or entry.task != "generate" or spec.pooling != "last":
        return "the same model, alone", lambda row: run(converted, [row], "right"), False
    weight = converted.get_submodule(spec.output.path).weight.detach().clone()
    causal = entry.load()(converted.config).eval()
    setattr(causal, causal.base_model_prefix, converted.backbone)
    states: list[Tensor] = []
    causal.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: states.append(inputs[0])
    )

    def reference(row: Row) -> Tensor:
        causal(**_tensors(row))
        return F.linear(states.pop()[:, -1].float(), weight.float())

    return f"{entry.architecture}'s last hidden state times {spec.output.path}", reference, True
