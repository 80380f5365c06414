# SPDX-License-Identifier: Apache-2.0
"""The card's rules as data: what each says, where it is known from, how bad breaking it is.

Loads no torch. The functions that look for breaches are in `checks.py` and `input_checks.py`.
Repositories: SI sendnn-inference, SpI spyre-inference, TS torch-spyre, HA hf-adapters, FMS
foundation-model-stack, AFTU aiu-fms-testing-utils; `#n` is an issue or pull request there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from headswap.spyre.device import DialectName

Severity = Literal["error", "warning"]
Place = Literal["graph", "inputs", "compile", "prepare", "paged", "executor", "plan"]

RULES_VERSION = "2026.12"
"""Year and month of the upstream files that the rules were read from."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    id        "R1" ...; ids are never given to another rule
    text      the rule in one line
    source    where it is known from
    places    where it is enforced; "graph" and "inputs" by the checker, the others by the module of
              that name
    severity  dialect -> "error" or "warning"; a dialect that is absent has no such rule
    since     month of the upstream state that first had it, where known
    until     month from which upstream no longer needs it, where known
    """

    id: str
    text: str
    source: str
    places: tuple[Place, ...]
    severity: Mapping[DialectName, Severity] = field(hash=False)
    since: str | None = None
    until: str | None = None

    def applies(self, dialect: DialectName) -> bool:
        """Whether the dialect has this rule."""
        return dialect in self.severity


_BOTH: Mapping[DialectName, Severity] = MappingProxyType({"sendnn": "error", "spyre": "error"})
# sendnn's compiler pads by itself: SI ships granite-embedding-30m, whose heads have 32 columns.
_SPYRE: Mapping[DialectName, Severity] = MappingProxyType({"sendnn": "warning", "spyre": "error"})
_SENDNN_ONLY: Mapping[DialectName, Severity] = MappingProxyType({"sendnn": "error"})
_ADVICE: Mapping[DialectName, Severity] = MappingProxyType(
    {"sendnn": "warning", "spyre": "warning"}
)

RULES: tuple[Rule, ...] = (
    Rule(
        "R1",
        "Every size is a number: dynamic=False, no symbolic dimension.",
        "SI pooling runner; SpI documentation. Paged decoders on sendnn are excepted",
        ("graph",),
        _BOTH,
    ),
    Rule("R2", "One graph: fullgraph=True, no breaks.", "SpI; SI #752", ("compile",), _BOTH),
    Rule(
        "R3",
        "Lengths are multiples of 64 (or 1, a decode step); rows within the largest batch.",
        "SI warm-up shapes; SpI buckets",
        ("inputs",),
        _BOTH,
    ),
    Rule(
        "R4",
        "Head sizes are multiples of 64; with rotary halves, 128.",
        "SpI supports_head_size; HA head padding",
        ("prepare", "graph"),
        _SPYRE,
    ),
    Rule(
        "R5",
        "Inner and output sizes of matrix products are multiples of 64.",
        "HA assertion on hidden and intermediate sizes; TS #4208",
        ("graph",),
        _SPYRE,
    ),
    Rule(
        "R6",
        "The graph computes in the device's dtype; fp32 in listed operators only, never a product.",
        "TS SPYRE_FP32_OPS; TS #1794",
        ("graph",),
        _BOTH,
    ),
    Rule(
        "R7",
        "No int64 or bool results in the graph; index inputs are excepted.",
        "TS #3509; SI #752. sendnn compiled graphs with two int64 results",
        ("graph",),
        _BOTH,
    ),
    Rule(
        "R8",
        "No operator that runs on the host or nowhere: arange, cumsum, argmax, index, random, ...",
        "TS supported_operations.md and ops/fallbacks.py; TS #3484",
        ("graph",),
        _SPYRE,
    ),
    Rule(
        "R9",
        "No slice, cat or pad at an offset inside a stick of the last dimension.",
        "TS #3133, #3916",
        ("graph",),
        _SPYRE,
    ),
    Rule(
        "R10",
        "Inputs are contiguous, start at offset 0 and own their storage.",
        "AFTU; TS #3770, #4449",
        ("inputs",),
        _BOTH,
    ),
    Rule(
        "R11",
        "Masks are additive, in the device's dtype, finite, and built outside the graph.",
        "HA; TS #4784, #4356",
        ("inputs", "graph"),
        _BOTH,
    ),
    Rule(
        "R12",
        "No infinite or NaN constant in the graph.",
        "HA numerics: -inf becomes -3.35e7, and inf - inf NaN",
        ("graph",),
        _BOTH,
    ),
    Rule(
        "R13",
        "A mask must not be fused into SDPA, whose lowering drops it.",
        "SpI encoder backend: cosine fell to 0.46",
        ("compile", "graph"),
        _SPYRE,
    ),
    Rule(
        "R14",
        "Operands of SDPA and of norms are contiguous.",
        "TS #1781; HA",
        ("graph",),
        _SPYRE,
    ),
    Rule(
        "R15",
        "Output heads: rows gathered first; columns padded to 64, or on the host.",
        "HA; SpI pooler",
        ("prepare", "graph"),
        _SPYRE,
    ),
    Rule(
        "R16",
        "Rows of a vocabulary matrix are padded to 64 x 32; a core's span is 256 MB.",
        "SpI lm_head; HA",
        ("prepare",),
        _SPYRE,
    ),
    Rule(
        "R17",
        "KV blocks are multiples of 64 tokens, block 0 is reserved, a step's slots are distinct.",
        "SI; FMS paged attention",
        ("paged",),
        _BOTH,
    ),
    Rule(
        "R18", "The number of blocks never changes after warm-up.", "SI #384", ("executor",), _BOTH
    ),
    Rule(
        "R19",
        "Batch x padded length within the volume; prompt and new tokens within the context.",
        "SI #363, #913, #954, #961",
        ("plan",),
        _BOTH,
    ),
    Rule("R20", "Freed blocks are zeroed before reuse.", "TS #4517; SpI #873", ("paged",), _BOTH),
    Rule(
        "R21",
        "Quantised decode steps have two rows at least.",
        "SI #312, #347, #466",
        ("executor",),
        _SENDNN_ONLY,
    ),
    Rule(
        "R22",
        "Under torch.no_grad, not inference_mode; in eval mode.",
        "SI platform",
        ("executor", "inputs"),
        _BOTH,
    ),
    Rule(
        "R23",
        "Warm-up compiles inside its context and deploys outside; no special token ids.",
        "SI #270, #284",
        ("executor",),
        _SENDNN_ONLY,
    ),
    Rule("R24", "Nothing is compiled after warm-up.", "SpI compile guard", ("executor",), _BOTH),
    Rule(
        "R25",
        "Pads on the left for sendnn, on the right for spyre.",
        "SI; HA",
        ("inputs",),
        _BOTH,
    ),
    Rule(
        "R26",
        "Attention is called once a layer, and its mask function is registered.",
        "transformers' interface: without one the mask arrives as None",
        ("prepare",),
        _BOTH,
    ),
    Rule(
        "R27",
        "Ids that select rows (positions, token types) are inputs, never made in the graph.",
        "SI #480; HA",
        ("graph",),
        _BOTH,
    ),
    Rule(
        "R28",
        "A change of dtype and a move between devices are two steps.",
        "SpI convert",
        ("graph",),
        _SPYRE,
    ),
    Rule(
        "R29",
        "Rotation tables exist before compiling; no sin or cos in the graph.",
        "SpI (a segmentation fault otherwise); TS ops/fallbacks.py",
        ("prepare", "graph"),
        _SPYRE,
    ),
    Rule(
        "R30",
        "Weights, cache and activations fit the card's memory.",
        "SI memory note",
        ("plan",),
        _ADVICE,
    ),
)

INTEGER_BUDGET: Mapping[DialectName, int] = MappingProxyType({"sendnn": 2, "spyre": 0})
"""R7: int64 and bool results that a graph may have (sendnn compiled BERT's two)."""
