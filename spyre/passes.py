# SPDX-License-Identifier: Apache-2.0
"""The passes that a backend wants, in their order."""

from __future__ import annotations

from functools import partial

from headswap.spyre.compiling import Guarded, alone, compile_layers
from headswap.spyre.experts import run_all_experts
from headswap.spyre.linears import lay_out, lay_out_int8
from headswap.spyre.looking import InputGuard, looked_at
from headswap.spyre.memory import Memory, memory
from headswap.spyre.own_attention import always_masked
from headswap.spyre.padding import pad_to_sticks
from headswap.spyre.precision import Precision
from headswap.spyre.prepare import Prepared, cast
from headswap.spyre.pruning import keep_last_layer
from headswap.spyre.shapes import ShapePlan
from headswap.spyre.stack import Backend
from headswap.spyre.surroundings import surroundings


@alone(compiled=True)
def fit(
    made: Prepared, backend: Backend, wanted: Precision, *, packs: bool, pad_weights: bool
) -> None:
    """Change `made` (a copy) into what `backend` runs, in `packs` or padded; each pass adds its
    report."""
    dtype, int8, why = wanted
    if backend.compiler is not None:
        always_masked(made)
        run_all_experts(made, sorted_too=backend.name != "inductor")
    if pad_weights and backend.name in ("checked", "spyre"):
        pad_to_sticks(made, backend.spec.stick)
    cast(made, dtype, why)
    if int8:
        lay_out_int8(made, packs)
    elif backend.compiler is None:
        lay_out(made, packs)
    else:
        made.reports += surroundings(made)


def card_memory(
    made: Prepared, backend: Backend, plan: ShapePlan | None, cached: int
) -> Memory | None:
    """What `plan` takes of a card with a cache of `cached` tokens; None where none is in play."""
    if plan is None or not backend.ruled:
        return None
    return memory(made, backend.spec, plan.shapes, cached)


def compile_for(
    made: Prepared, backend: Backend, plan: ShapePlan | None, guard: InputGuard | None
) -> Guarded | None:
    """Have the layers of `made` compiled for `plan` when they first run; None where nothing is.

    `guard` looks at what each run gives the first layer: on a card always, else after warm-up,
    since a checked graph was looked at with what it was compiled for.
    """
    if backend.compiler is None or plan is None:
        return None
    compiler = Guarded(backend.compiler)
    compiler.planned = ", ".join(map(str, plan.shapes))
    keep_last_layer(made)
    first = None if guard is None else partial(
        looked_at, guard=guard, wanted=lambda: compiler.frozen or backend.on_card
    )  # fmt: skip
    limit = 8 * len(plan.shapes) + 8
    compile_layers(made.backbone, compiler, limit, backend.device, first)
    return compiler
