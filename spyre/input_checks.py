# SPDX-License-Identifier: Apache-2.0
"""The rules about what a graph is called with, one function a rule.

Each takes inputs and a device, and yields findings; none changes anything. Values are looked at
where there are any: a traced tensor has a shape and a dtype only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch._subclasses import FakeTensor

from headswap.spyre.device import DeviceSpec
from headswap.spyre.findings import Finding
from headswap.spyre.shapes import LENGTH_STEP
from headswap.spyre.traced import Input, at_input, dtype_name, is_integer

InputCheck = Callable[[Sequence[Input], DeviceSpec], Iterator[Finding]]

_TOKEN_INPUTS = ("input_ids", "attention_mask", "position_ids", "token_type_ids")


def check_lengths(inputs: Sequence[Input], spec: DeviceSpec) -> Iterator[Finding]:
    """R3: lengths are multiples of 64, or 1 in a decode step; rows within the largest batch."""
    for given in _user(inputs):
        for length in _lengths(given):
            if isinstance(length, int) and length != 1 and length % LENGTH_STEP:
                yield at_input(
                    "R3",
                    given,
                    f"length {length} is no multiple of {LENGTH_STEP}",
                    "pad to a shape of the plan (ShapePlan.fit)",
                )
        rows = given.tensor.shape[0] if _lengths(given) else 0
        if isinstance(rows, int) and rows > spec.max_batch:
            yield at_input(
                "R3",
                given,
                f"{rows} rows are more than the device's {spec.max_batch}",
                "split the batch over several runs (ShapePlan.fit)",
            )


def _lengths(given: Input) -> list[int]:
    """The sizes that count tokens. Caches and rotation tables of rank 4 have none that is known."""
    shape = given.tensor.shape
    if given.is_mask and len(shape) == 4:
        return [shape[2], shape[3]]
    if len(shape) == 2 and any(name in given.name for name in _TOKEN_INPUTS):
        return [shape[1]]
    return [shape[1]] if len(shape) == 3 and not is_integer(given.tensor) else []


def check_storage(inputs: Sequence[Input], spec: DeviceSpec) -> Iterator[Finding]:
    """R10: contiguous, offset 0, own storage. The model's own tensors are copied when shipped."""
    given_tensors = list(_user(inputs))
    owners: dict[int, list[str]] = defaultdict(list)
    for given in given_tensors:
        owners[given.tensor.untyped_storage()._cdata].append(given.name)
    for given in given_tensors:
        what = _storage_fault(given.tensor)
        shared = [n for n in owners[given.tensor.untyped_storage()._cdata] if n != given.name]
        if shared:
            what = f"shares its storage with {', '.join(shared)}"
        if what:
            yield at_input("R10", given, what, "pass a copy: tensor.contiguous().clone()")


def _storage_fault(tensor: torch.Tensor) -> str | None:
    if not tensor.is_contiguous():
        return f"is not contiguous, its strides are {list(tensor.stride())}"
    if tensor.storage_offset():
        return f"starts at offset {tensor.storage_offset()} of its storage"
    if isinstance(tensor, FakeTensor):  # symbolic or traced: its storage has no size of its own
        return None
    bytes_used = tensor.numel() * tensor.element_size()
    if tensor.untyped_storage().nbytes() > bytes_used:
        return "is a view of a larger storage"
    return None


def check_masks(inputs: Sequence[Input], spec: DeviceSpec) -> Iterator[Finding]:
    """R11: masks are additive, in the device's dtype, and finite."""
    for given in inputs:
        if not given.is_mask:
            continue
        dtype = dtype_name(given.tensor.dtype)
        if dtype != spec.dtype:
            kind = "is no additive mask" if is_integer(given.tensor) else "has the wrong dtype"
            yield at_input(
                "R11",
                given,
                f"a mask of {dtype} {kind}",
                f"build it on the host: 0 where visible, finfo.min / 2 elsewhere, {spec.dtype}",
            )
        elif _has_values(given.tensor) and not bool(torch.isfinite(given.tensor).all()):
            yield at_input(
                "R11",
                given,
                "holds values that are not finite",
                "fill hidden places with finfo.min / 2, not -inf",
            )


def check_mode(inputs: Sequence[Input], spec: DeviceSpec) -> Iterator[Finding]:
    """R22: no gradients, and no inference tensors."""
    for given in inputs:
        if given.tensor.is_inference():
            what, remedy = "is an inference tensor", "use torch.no_grad, not inference_mode"
        elif given.tensor.requires_grad and torch.is_grad_enabled():
            what, remedy = "requires a gradient", "run under torch.no_grad"
        else:
            continue
        yield at_input("R22", given, what, remedy)


def check_pad_side(inputs: Sequence[Input], spec: DeviceSpec) -> Iterator[Finding]:
    """R25: pads on the device's side. Read from masks with one row of keys a text only.

    Where each query has its own row, a causal mask's last key looks like a pad, so nothing is said.
    """
    for given in inputs:
        visible = _visible_keys(given)
        if visible is None:
            continue
        wrong = visible[:, -1] if spec.pad_side == "left" else visible[:, 0]
        rows = torch.nonzero(~wrong & visible.any(dim=1)).flatten().tolist()
        if rows:
            yield at_input(
                "R25",
                given,
                f"{len(rows)} row(s) have pads on the {_other(spec.pad_side)}, row {rows[0]} first",
                f"pad on the {spec.pad_side} for {spec.dialect}",
            )


def _visible_keys(given: Input) -> torch.Tensor | None:
    """`[batch, length]` truth values of a mask with one row of keys a text; None for others."""
    tensor = given.tensor
    if not given.is_mask or not _has_values(tensor):
        return None
    if tensor.dim() == 4 and tensor.shape[1] == tensor.shape[2] == 1:
        tensor = tensor[:, 0, 0]
    if tensor.dim() != 2 or not tensor.shape[1]:
        return None
    return tensor != 0 if is_integer(tensor) else tensor == 0


def _other(side: str) -> str:
    return "right" if side == "left" else "left"


def _user(inputs: Sequence[Input]) -> Iterator[Input]:
    return (given for given in inputs if given.kind == "user")


def _has_values(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"
