# SPDX-License-Identifier: Apache-2.0
"""What a backbone is like, learned by running a few tokens through it; no list of families.

Every way that an executor may take (our attention, packs, pads) is compared with the model's own
on the same rows, and is taken only where the numbers agree.
"""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

import torch
from torch import Tensor, nn

from headswap.registry.errors import HeadswapError
from headswap.spyre.given import plain_ids
from headswap.spyre.hook import BATCH, implementations, install, probe, remember, restore
from headswap.spyre.packs import Laid, pooled_places, run_laid, run_texts
from headswap.spyre.prepare import PassReport, Prepared, backbone_of
from headswap.spyre.pruning import keep_last_layer, prune_last_layer

LENGTHS = (9, 2, 5)
"""Tokens of the rows that are run."""
TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference, relative to the largest number, at which two ways count as the same; 1e-4 for
other dtypes. A wrong way is off by a tenth and more, sums in another order by 1e-6 (fp32)."""
FAILURES = (TypeError, ValueError, AttributeError, IndexError, RuntimeError, KeyError)
"""What a backbone raises that does not know what to do with our inputs."""


@torch.no_grad()
def learn(made: Prepared, plain: Any) -> None:
    """Fill in what `made` can do; `plain` is a copy of the model as it was."""
    rows = probe_rows(plain.config)
    alone = _outputs(backbone_of(plain), rows)
    if alone and _hook(made, rows, alone):
        _learn_packs(made, rows, alone)
        made.reports.append(PassReport("attention", f"ours, {len(made.layers)} calls"))
    else:
        made.reports.append(PassReport("attention", "the backbone's own"))


@torch.no_grad()
def learn_pads(made: Prepared, plain: Any) -> None:
    """Fill in whether a backbone that runs its own way may be padded."""
    if not made.hooked and made.head_spec is not None:
        rows = probe_rows(plain.config)
        made.padded = made.padded and _padded_alike(plain, rows, made.pad)


def probe_rows(config: Any, lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    """Ids that no config calls special, with an end mark behind them; the same ones every time."""
    text = config.get_text_config()
    size = getattr(text, "vocab_size", None) or 8
    usable = plain_ids(config)
    end = getattr(text, "eos_token_id", None)
    end = end if isinstance(end, int) and 0 <= end < size else usable[0]
    generator = torch.Generator().manual_seed(0)
    return [
        torch.tensor([*torch.tensor(usable)[torch.randint(len(usable), (n - 1,),
                                                          generator=generator)].tolist(), end])
        for n in lengths
    ]  # fmt: skip


def padded_batch(rows: list[Tensor], pad: int) -> dict[str, Tensor]:
    """`rows` padded on the right, with their mask."""
    width = max(len(row) for row in rows)
    fill = nn.functional.pad
    return {
        "input_ids": torch.stack([fill(r, (0, width - len(r)), value=pad) for r in rows]),
        "attention_mask": torch.stack([fill(torch.ones_like(r), (0, width - len(r)))
                                       for r in rows]),
    }  # fmt: skip


def same(found: Tensor, own: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether two tensors are the same numbers up to rounding in `dtype` (default: their own)."""
    if found.shape != own.shape:
        return False
    limit = TOLERANCES.get(dtype or own.dtype, 1e-4) * max(float(own.abs().max()), 1e-6)
    return bool((found.float() - own.float()).abs().max() <= limit)


def _outputs(backbone: nn.Module, rows: list[Tensor]) -> list[Any]:
    """The backbone's output for each row alone; nothing where it wants other inputs."""
    try:
        return [backbone(**padded_batch([row], 0), return_dict=True) for row in rows]
    except FAILURES:
        return []


def _hook(made: Prepared, rows: list[Tensor], alone: list[Any]) -> bool:
    """Hand the backbone's attention to us, if it can be and the numbers stay."""
    if _asks_for_a_name(made.backbone):
        return False
    kinds = inspect.signature(made.backbone.forward).parameters.values()
    if BATCH not in made.inputs and not any(p.kind is p.VAR_KEYWORD for p in kinds):
        return False
    before = implementations(made.backbone)
    batch = padded_batch(rows, made.pad)
    install(made.backbone, "native")  # which does whatever a layer may want
    try:
        made.layers = probe(made.backbone, batch)
        states = made.backbone(**batch)[0] if made.layers else None
    except FAILURES:
        states = None
    if states is not None and all(
        same(found[: len(row)], own[0][0])
        for found, row, own in zip(states, rows, alone, strict=True)
    ):
        remember(made.layers)
        return True
    made.layers = []
    restore(before)
    return False


def _asks_for_a_name(backbone: nn.Module) -> bool:
    """Whether the backbone does something for attention of certain names only, which ours is not
    (DeepSeek-V3.2 drops its sparse mask, whose effect begins behind rows that can be run here)."""
    module = sys.modules.get(type(backbone).__module__)
    try:
        source = inspect.getsource(module) if module is not None else ""
    except OSError:
        return False
    return re.search(r"_attn_implementation (not )?in ", source) is not None


def _learn_packs(made: Prepared, rows: list[Tensor], alone: list[Any]) -> None:
    """Whether packs give the backbone's own states, and at which position a text begins."""
    if any(layer.visibility is None for _, layer in made.layers):
        return
    if "position_ids" not in made.inputs:
        return
    own = torch.cat([found[0][0] for found in alone])
    pad = getattr(made.backbone.config, "pad_token_id", None)
    for offset in (0, *(() if not isinstance(pad, int) else (pad + 1,))):
        made.offset = offset
        try:
            found = run_texts(made, rows)
        except FAILURES:  # a table without such a position; a layer that packs do not fit
            continue
        if same(found, own):
            made.packable = _pools_alike(made, alone)
            if made.packable and made.head_spec is not None:
                _learn_pruning(made, rows, alone)
            return
    made.offset = 0


def _learn_pruning(made: Prepared, rows: list[Tensor], alone: list[Any]) -> None:
    """Whether the last layer gives the same for two rows of a text as for all of them."""
    prune_last_layer(made.backbone)
    laid = Laid.of(made, [(0, rows)])
    try:
        for pooling, place in (("first", 0), ("last", -1)):
            index = pooled_places(laid, rows, pooling, ())
            found = run_laid(made, laid, None, laid.last(index))
            own = torch.stack([each[0][0, place] for each in alone])
            if not same(found, own):
                raise ValueError(pooling)
        made.prunes = True
    except FAILURES:
        keep_last_layer(made)


def _pools_alike(made: Prepared, alone: list[Any]) -> bool:
    """Whether a backbone's pooler can be called on rows of its states."""
    if made.head_spec is None or made.head_spec.pooling != "pooler":
        return True
    try:
        found = made.pooler(torch.cat([each[0][:, 0] for each in alone]))
    except FAILURES:
        return False
    return same(found, torch.cat([each.pooler_output for each in alone]))


@torch.no_grad()
def pads_are_free(model: Any, pad: int) -> bool:
    """Whether pads behind a text leave what `model` gives for it as it is."""
    return _padded_alike(model, probe_rows(model.config), pad)


@torch.no_grad()
def numbers(model: Any, rows: list[Tensor], pad: int) -> Tensor:
    """What `model` gives for each row alone, one behind the other: results, or a causal language
    model's logits."""
    found = [_results(model, padded_batch([row], pad)) for row in rows]
    return torch.cat([each.flatten(0, -2) for each in found])


def _padded_alike(plain: Any, rows: list[Tensor], pad: int) -> bool:
    """Whether the model's logits for a row are the same with pads behind it."""
    try:
        found = _results(plain, padded_batch(rows, pad))
        own = torch.cat([_results(plain, padded_batch([row], pad)) for row in rows])
    except (HeadswapError, *FAILURES):
        return False
    return same(found, own)


def _results(model: Any, batch: dict[str, Tensor]) -> Tensor:
    output = model(**batch)
    found: Tensor = output.logits if "logits" in output else output.pooler_output
    return found
