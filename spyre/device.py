# SPDX-License-Identifier: Apache-2.0
"""What the card and its two software stacks want, as numbers; which stack is here.

Nothing here imports torch or a device package: stacks are found by `importlib.util.find_spec`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from types import MappingProxyType
from typing import Literal

from headswap.spyre.errors import DeviceError

DialectName = Literal["sendnn", "spyre"]
PadSide = Literal["left", "right"]

ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {"float16": 2, "bfloat16": 2, "float32": 4, "int32": 4, "float8_e4m3fn": 1}
)
"""Bytes an element, by torch's dtype name; int64 and bool stay on the host (torch-spyre)."""

_APPLIED = "__headswap_environment__"


class Stack(Enum):
    """The compilers that can put a graph on the card; the value is the module's name."""

    SENDNN = "torch_sendnn"
    TORCH_SPYRE = "torch_spyre"
    NONE = ""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one stack wants to be driven.

    `compile_backend`: the name for `torch.compile(backend=...)`.
    `compile_arguments`: what that backend is given beside a graph: static shapes (AFTU's static
    path), or no fusing of attention, whose mask the card's kernel drops (spyre-inference).
    `tensor_device`: where a graph's inputs live; sendnn ships them itself.
    `deploy_pass`: after the warm-up context closes, one more forward puts the program on the card
    (sendnn-inference's warm-up; without it the first request pays).
    """

    name: DialectName
    stack: Stack
    compile_backend: str
    compile_arguments: Mapping[str, Mapping[str, bool]]
    tensor_device: str
    deploy_pass: bool


DIALECTS: Mapping[DialectName, Dialect] = MappingProxyType(
    {
        "sendnn": Dialect(
            "sendnn",
            Stack.SENDNN,
            "sendnn",
            {"options": {"sendnn.dynamic": False}},
            "cpu",
            deploy_pass=True,
        ),
        "spyre": Dialect(
            "spyre",
            Stack.TORCH_SPYRE,
            "inductor",
            {"config_patches": {"pattern_matcher": False}},
            "spyre",
            deploy_pass=False,
        ),
    }
)


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """The card's limits under one dialect.

    dialect           a name in `DIALECTS`
    stick_bytes       bytes; the last dimension is padded up to whole sticks (torch-spyre, tensor
                      layout documents)
    block_size        tokens a KV block; sendnn-inference fixes 64, spyre-inference takes 128 unless
                      told otherwise
    dtype             torch's name; fp16 is the only validated dtype of a graph (torch-spyre)
    max_batch         rows a run of an encoder; 64 is the largest batch in sendnn-inference's list
                      of known configurations (512 x 64), which spyre-inference does not limit
    max_decode_batch  rows a step of a decoder (sendnn-inference, known configurations)
    max_context       tokens a row; 32,768 is sendnn-inference's default ceiling
    max_volume        tokens, batch x padded length, asserted at every step
                      (VLLM_DT_MAX_BATCH_TKV_LIMIT; torch-spyre states no such bound, so the
                      production stack's is kept)
    chunk             tokens a prefill chunk (sendnn-inference, max_num_batched_tokens)
    pad_side          left for sendnn, right for spyre (sendnn-inference; hf-adapters)
    memory_bytes      bytes on the card: 128 GB in decimal, the cautious reading (torch-spyre)
    """

    dialect: DialectName
    block_size: int
    pad_side: PadSide
    stick_bytes: int = 128
    dtype: str = "float16"
    max_batch: int = 64
    max_decode_batch: int = 32
    max_context: int = 32_768
    max_volume: int = 131_072
    chunk: int = 512
    memory_bytes: int = 128 * 10**9

    def __post_init__(self) -> None:
        if self.dialect not in DIALECTS:
            known = ", ".join(sorted(DIALECTS))
            raise DeviceError(
                f"Unknown dialect {self.dialect!r}; known: {known}.", dialect=self.dialect
            )
        if self.pad_side not in ("left", "right"):
            raise DeviceError(
                f"pad_side is {self.pad_side!r}; expected 'left' or 'right'.",
                pad_side=self.pad_side,
            )
        for name in ("max_batch", "max_decode_batch", "max_context", "max_volume", "memory_bytes"):
            self._check_multiple(name, 1)
        for name in ("block_size", "chunk"):
            self._check_multiple(name, self.stick)

    def _check_multiple(self, name: str, step: int) -> None:
        value = getattr(self, name)
        if value < 1 or value % step:
            raise DeviceError(
                f"{name} is {value}; expected a positive multiple of {step}.",
                name=name,
                value=value,
                step=step,
            )

    @property
    def traits(self) -> Dialect:
        """How this spec's stack wants to be driven."""
        return DIALECTS[self.dialect]

    @property
    def stick(self) -> int:
        """Elements a stick in the spec's own dtype: 64 for float16."""
        return self.stick_elements(self.dtype)

    def stick_elements(self, dtype: str) -> int:
        """Elements a stick in `dtype` (torch's name): 64 float16, 32 float32, 128 float8."""
        if dtype not in ITEM_BYTES:
            raise DeviceError(
                f"The card has no stick of {dtype!r}; it has {', '.join(sorted(ITEM_BYTES))}.",
                dtype=dtype,
            )
        return self.stick_bytes // ITEM_BYTES[dtype]


SENDNN = DeviceSpec("sendnn", block_size=64, pad_side="left")
"""The production stack: a captured graph, weights shipped at deployment."""

SPYRE = DeviceSpec("spyre", block_size=128, pad_side="right")
"""The newer stack: tensors on the device, compiled block by block."""


def detect() -> Stack:
    """The stack that this Python can import, the production one first; imports neither."""
    for stack in (Stack.SENDNN, Stack.TORCH_SPYRE):
        if _importable(stack.value):
            return stack
    return Stack.NONE


def _importable(module: str) -> bool:
    if module in sys.modules:  # find_spec refuses a module which was made by hand
        return sys.modules[module] is not None
    return find_spec(module) is not None


def environment(spec: DeviceSpec) -> dict[str, str]:
    """Variables that torch_sendnn reads once, when it is imported; none for the other dialect.

    Two rows at least, because the compiler takes no smaller maximum (sendnn-inference).
    """
    if spec.dialect != "sendnn":
        return {}
    return {
        "VLLM_DT_CHUNK_LEN": str(spec.chunk),
        "VLLM_DT_MAX_BATCH_SIZE": str(max(2, spec.max_decode_batch)),
        "VLLM_DT_MAX_BATCH_TKV_LIMIT": str(spec.max_volume),
        "VLLM_DT_MAX_CONTEXT_LEN": str(spec.max_context),
    }


@contextmanager
def applied(env: Mapping[str, str]) -> Iterator[None]:
    """Set `env` for the first import of torch_sendnn inside the `with`; restore it afterwards.

    Raises `DeviceError` where torch_sendnn was already imported with other values, since it would
    go on using those.
    """
    _refuse_late(env)
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        yield
    finally:
        _remember(env)
        _restore(before)


def _refuse_late(env: Mapping[str, str]) -> None:
    module = sys.modules.get(Stack.SENDNN.value)
    if module is None:
        return
    # Imported by somebody else: what it read is not known, today's environment is the best guess.
    read: Mapping[str, str] = getattr(module, _APPLIED, os.environ)
    late = {k: (read.get(k), v) for k, v in sorted(env.items()) if read.get(k) != v}
    if late:
        listed = "; ".join(
            f"{name} was {old!r}, asked {new!r}" for name, (old, new) in late.items()
        )
        raise DeviceError(
            f"torch_sendnn is already imported and reads its environment only once: {listed}. "
            "Use one device specification a process, or set these variables before the import.",
            variables=late,
        )


def _remember(env: Mapping[str, str]) -> None:
    module = sys.modules.get(Stack.SENDNN.value)
    if module is not None and not hasattr(module, _APPLIED):
        setattr(module, _APPLIED, dict(env))


def _restore(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
