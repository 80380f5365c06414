# SPDX-License-Identifier: Apache-2.0
"""What short rows do not show: longer rows, through the first layer of each kind.

Windows, keys that are pressed together and RoPE that turns by length begin beyond some number of
tokens. A whole run of a long row costs seconds on a large model; layers of one kind do the same, so
the row goes up to the first layer of the last kind, and the states there are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headswap.spyre.compiling import outer_layers
from headswap.spyre.hook import configs, implementations, restore
from headswap.spyre.learning import FAILURES, padded_batch, probe_rows, same
from headswap.spyre.packs import Laid, run_laid
from headswap.spyre.prepare import PassReport, Prepared, backbone_of
from headswap.spyre.pruning import keep_last_layer
from headswap.spyre.settled import Settled

LONGER = 150
"""Tokens of the row at least: more than the blocks of 64 and 128 in which families press keys
together. With planned shapes it is as long as the longest, since a bound may lie between."""
MOST = 2_048
"""Tokens of the row at most."""


@torch.no_grad()
def look_further(made: Prepared, plain: Any, settled: Settled, longest: int = 0) -> None:
    """Take back what `made` was learned to do, where a longer row shows it to be otherwise; `plain`
    is a copy of the model as it was, which `settled` puts back. Rows beyond a bound that is known
    are refused elsewhere."""
    bounds = (max(LONGER, min(longest, MOST)), made.lengths.table, made.lengths.alike)
    size = min(bound for bound in bounds if bound is not None)
    layers, count = outer_layers(made.backbone), _first_of_each(made)
    if size <= 9 or not count:
        return
    rows = probe_rows(made.model.config, (size, size * 5 // 8, 5))
    rows.append(torch.cat([rows[0][: size // 2], rows[2]]))
    theirs = partial(_padded, backbone_of(plain), count=count, pad=made.pad, settle=settled.restore)
    own = [theirs([row]) for row in rows]
    if any(states is None or not states.isfinite().all() for states in own):
        return
    ours = _padded(made.backbone, rows[:1], count=count, pad=made.pad, settle=made.settle)
    if made.layers and not _same(ours, own[:1]):
        _give_back(made, plain)
    if made.packable and not _same(_packed(made, [(0, rows)], count), own):
        made.packable = False
        keep_last_layer(made)
    if made.causal:
        alike = [(0, rows[1:3]), (size // 2, [rows[0], rows[3]])]
        found = _packed(made, alike, count)
        made.shares = _same(found, [own[1], own[2], own[0], own[3]])
    if not made.hooked:
        made.padded = _same(theirs(rows), own)
    said = f"{size} tokens through {count} of {len(layers)} layers"
    made.reports.append(PassReport("longer row", said))


def _first_of_each(made: Prepared) -> int:
    """How many layers there are up to the first one of the last kind."""
    config: Any = made.backbone.config
    named = list(getattr(config.get_text_config(), "layer_types", None) or ())
    learned = {id(module): layer for module, layer in made.layers}
    seen: set[Any] = set()
    count = 0
    for i, layer in enumerate(outer_layers(made.backbone)):
        kind = (
            named[i] if i < len(named) else None,
            *(type(m) for m in layer.modules() if any(True for _ in m.parameters(recurse=False))),
            *(learned[id(m)] for m in layer.modules() if id(m) in learned),
        )
        if kind not in seen:
            seen.add(kind)
            count = i + 1
    return count


class _Reached(Exception):  # noqa: N818 - no error: it ends a run that went far enough
    pass


def _padded(
    backbone: nn.Module, rows: list[Tensor], *, count: int, pad: int, settle: Callable[[], None]
) -> Any:
    """The states `[rows, tokens, ...]` of `rows`, padded, behind the first `count` layers."""
    settle()
    run = partial(backbone, **padded_batch(rows, pad), return_dict=True)
    return _upto(backbone, run, count)


def _packed(made: Prepared, groups: list[tuple[int, list[Tensor]]], count: int) -> Any:
    """The states `[tokens, ...]` of each text of `groups`, run as one pack."""
    laid = Laid.of(made, groups)
    found = _upto(made.backbone, partial(run_laid, made, laid), count)
    return None if found is None else laid.texts(found[0])


def _upto(backbone: nn.Module, run: Callable[[], Any], count: int) -> Any:
    """The states `[batch, tokens, ...]` behind the first `count` layers of `run`; None where it
    does not get there."""
    found: list[Tensor] = []

    def keep(module: nn.Module, given: Any, output: Any) -> None:
        found.append(output[0] if isinstance(output, (tuple, list)) else output)
        raise _Reached

    handle = outer_layers(backbone)[count - 1].register_forward_hook(keep)
    try:
        run()
    except (_Reached, *FAILURES):
        pass
    finally:
        handle.remove()
    return found[0] if found and found[0].dim() >= 3 else None


def _same(found: Any, own: list[Any]) -> bool:
    """Whether `found` holds the states of each row alone, pads behind them aside."""
    return found is not None and all(
        same(states[: alone.shape[1]], alone[0]) for states, alone in zip(found, own, strict=True)
    )


def _give_back(made: Prepared, plain: Any) -> None:
    """Let the backbone compute its own attention again."""
    keep_last_layer(made)
    names = [name for _, name in implementations(backbone_of(plain))]
    restore(list(zip(configs(made.backbone), names, strict=True)))
    made.layers, made.packable = [], False
    made.reports = [report for report in made.reports if report.name != "attention"]
    made.reports.append(PassReport("attention", "the backbone's own, as a longer row showed"))
