# SPDX-License-Identifier: Apache-2.0
"""Which ATen operators the card runs: data, after torch-spyre's table of supported operations.

A name is ATen's without overload ("add"), or with it where overloads differ ("where.default").
Source: torch-spyre `docs/source/user_guide/supported_operations.md`, its `ops/fallbacks.py`, and
the issues named in the notes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

OpKind = Literal["native", "host", "missing", "conditional", "unknown"]


class OpPolicy(NamedTuple):
    """What becomes of an operator: `native` on the card; `host`, copied there and back; `missing`,
    refused or wrong; `conditional`, native in some forms; `unknown`, in no table."""

    kind: OpKind
    note: str = ""


def names(text: str) -> frozenset[str]:
    """Operators' names from a text of words."""
    return frozenset(text.split())


VIEWS = names(
    "view _unsafe_view reshape _reshape_alias t transpose permute unsqueeze squeeze expand select "
    "slice alias detach split split_with_sizes unbind flatten unfold lift_fresh_copy"
)
"""Operators that choose or reorder elements and compute nothing."""

COPIES = names("clone contiguous _to_copy cat repeat constant_pad_nd")

SDPA = names(
    "scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_fused_attention_overrideable"
)
"""Attention as one operator; the card's stack decomposes it."""

_NATIVE = names(
    "mm bmm addmm baddbmm linear matmul _softmax _safe_softmax native_layer_norm rms_norm "
    "_fused_rms_norm gelu silu relu sigmoid softplus mish abs neg exp log sqrt rsqrt reciprocal "
    "tanh floor ceil sign clamp pow add sub rsub mul div maximum minimum where logical_not "
    "logical_and bitwise_not eq ne gt lt ge le sum mean amax amin any all linalg_vector_norm "
    "aminmax slice_scatter ones new_ones zeros full empty_like ones_like zeros_like full_like "
    "scalar_tensor embedding triu"
)

_HOST = names(
    "arange sin cos tril isin bitwise_xor bitwise_or argmax argmin cumsum normal uniform random "
    "rand randn rand_like randn_like multinomial bernoulli"
)

_MISSING: Mapping[str, str] = {
    "index": "advanced indexing (TS #3484)",
    "index_put": "advanced indexing (TS #3484)",
    "gather": "in no table of supported operators",
    "scatter": "in no table of supported operators",
    "scatter_add": "in no table of supported operators",
    "nonzero": "its size depends on values",
    "masked_select": "its size depends on values",
    "masked_fill": "no eager kernel (TS #4356)",
    "clamp_min": "in no table of supported operators",
    "convolution": "its im2col step runs on the host",
    "native_dropout": "the model is in training mode",
    "__lshift__": "integer shifts (TS #3509)",
    "__rshift__": "integer shifts (TS #3509)",
    "where.default": "its size depends on values",
    "sort": "in no table of supported operators",
}

_CONDITIONAL: Mapping[str, str] = {
    "topk": "k up to 4",
    "index_select": "an int32 index",
    "prod": "one dimension at a time",
    "bitwise_and": "bool operands; others run on the host",
    "max": "no int64 operand",
    "min": "no int64 operand",
    "flip": "any dimension but the last",
    "index_copy": "a slot-major device layout; the default one scatters into wrong rows (TS #3705)",
    "masked_scatter": "a mask that broadcasts along the last dimension",
    "stack": "outside a compiled graph",
}


def _table() -> dict[str, OpPolicy]:
    table = {name: OpPolicy("native") for name in _NATIVE | VIEWS | COPIES | SDPA}
    table |= {name: OpPolicy("host") for name in _HOST}
    table |= {name: OpPolicy("missing", note) for name, note in _MISSING.items()}
    return table | {name: OpPolicy("conditional", note) for name, note in _CONDITIONAL.items()}


OP_POLICY: Mapping[str, OpPolicy] = MappingProxyType(_table())

FP32_OPS = names(
    "add sub rsub mul where div relu reciprocal mean sum amax amin max min abs neg exp sigmoid "
    "silu sqrt rsqrt floor maximum minimum clamp prod topk native_layer_norm _softmax "
    "eq ne gt lt ge le"
)
"""Operators that compute in fp32 (TS `SPYRE_FP32_OPS`, in ATen's names).

`native_layer_norm` is there by its parts; `_softmax` decomposes into amax, sub, exp, sum and div.
"""


def op_policy(name: str, overload: str = "") -> OpPolicy:
    """The policy of an operator, by name and overload, else by name; `unknown` where none is."""
    found = OP_POLICY.get(f"{name}.{overload}") or OP_POLICY.get(name)
    return found or OpPolicy("unknown", "in no table of supported operators")
