# SPDX-License-Identifier: Apache-2.0
"""Compares a converted model with its reference class, on the same ids.

Both run each row alone, and both run the rows as one batch. The reference's batch is padded on the
right, where every class of transformers is right; ours on either side. So each comparison is one
of like with like: a batch differs from its rows one by one by what rounding (and, in a few
families, the class's own convolutions) makes of another shape, and `spread` tells how much.
"""

from __future__ import annotations

import gc
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from headswap.convert.decide import Options
from headswap.convert.job import Job, prepare
from headswap.convert.reference import Reference, Row, alone, reference_of, run
from headswap.registry.errors import ConversionError

LENGTHS = (5, 11, 8, 3)
TOLERANCE = 1e-5
"""fp32 bound on a logit's difference, relative to 1 + the largest logit: sums in another order. Of
label tokens subtracted from each other, the largest token logit counts."""


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
    """The largest logit, of label tokens too that are subtracted from each other."""
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
    name, reference, independent = reference_of(job)
    wanted = [_both(reference, part) for part in (rows, pairs) if part]
    del reference
    gc.collect()
    model = job.load(torch.float32).eval()
    cases = [Case("alone", _gap(alone(model, rows), wanted[0].alone))]
    cases += _batched(model, "padded", rows, wanted[0].batch)
    if pairs:
        cases += _batched(model, "pairs, padded", pairs, wanted[1].batch)
    else:
        cases.append(Case("pairs", None, "the model has no segment ids"))
    return VerifyReport(
        job.checkpoint.name,
        name,
        scale=max(part.size for part in wanted),
        cases=tuple(cases),
        spread=max(_gap(part.batch, part.alone) for part in wanted),
        independent=independent,
    )


@dataclass(frozen=True, slots=True)
class _Both:
    """The reference's logits `[rows, labels]`, row by row and as one batch."""

    alone: Tensor
    batch: Tensor
    size: float


def _both(reference: Reference, rows: list[Row]) -> _Both:
    alone, batch = [reference([row]) for row in rows], reference(rows).logits.cpu()
    size = max(each.size for each in alone)
    return _Both(torch.cat([each.logits for each in alone]).cpu(), batch, size)


def _batched(model: Any, name: str, rows: list[Row], wanted: Tensor) -> list[Case]:
    return [Case(f"{name} {side}", _gap(run(model, rows, side), wanted))
            for side in ("right", "left")]  # fmt: skip


def _gap(found: Tensor, wanted: Tensor) -> float:
    return float((found.cpu() - wanted).abs().max())


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
