# SPDX-License-Identifier: Apache-2.0
"""An ONNX file's initialisers under the names of the model that was exported.

torch's exporter keeps the names of embeddings, norms and biases. The matrix of a linear layer it
transposes and stores without a name (`onnx::MatMul_123`); the node that uses it says where it
belongs (`/bert/encoder/layer.0/attention/self/query/MatMul`). onnxruntime's quantiser adds
`_quantized`, `_scale` and `_zero_point`. Only tensors are read: the classes and config decide what
is computed, and what fits no parameter of theirs is an error that names it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headswap.registry.errors import CheckpointError

_MATRIX = ("MatMul", "MatMulInteger", "Gemm")
# What the model lay in when it was exported (sentence-transformers' and other wrappers).
_WRAPPERS = re.compile(r"^(?:(?:.+\.)?auto_model|base)\.")
# Linear layers of the GPT-2 family store [in, out], as ONNX does.
_UNTURNED = re.compile(r"\.c_(attn|proj|fc)\.weight$")
_SCOPES = "pkg.torch.onnx.name_scopes"


def find_onnx(folder: Path) -> str | None:
    """The one .onnx file in `folder` or its folder `onnx`; None if there is none.

    Raises `CheckpointError` for several, with their names.
    """
    files = [*folder.glob("*.onnx"), *folder.glob("onnx/*.onnx")]
    found = sorted(file.relative_to(folder).as_posix() for file in files)
    if len(found) > 1:
        raise CheckpointError(
            f"{folder} has {len(found)} ONNX files; name one of: {', '.join(found)}.",
            path=str(folder),
        )
    return found[0] if found else None


def read_onnx(file: Path) -> dict[str, Tensor]:
    """The tensors of `file` by the names of the exported model's parameters, dequantised to fp32.

    A tensor whose parameter can't be told keeps its own name. Raises `CheckpointError` for a
    missing package, a damaged file, and a name that two different tensors claim.
    """
    graph = _graph(file)
    stored = {item.name: item for item in graph.initializer}
    found: dict[str, Tensor] = {}
    for own, tensor in _dense(stored, file):
        name, turned = _place(own, graph)
        value = tensor.t().contiguous() if turned and tensor.ndim == 2 else tensor
        if name in found and not torch.equal(found[name], value):
            raise CheckpointError(
                f"{file} has two different tensors for {name}; one is {own}.",
                path=str(file), tensor=own,
            )  # fmt: skip
        found[name] = value
    return found


def _graph(file: Path) -> Any:
    try:
        import onnx
    except ImportError as error:
        raise CheckpointError(
            f"Reading {file} needs the package onnx. Install it with: pip install onnx",
            path=str(file), package="onnx",
        ) from error  # fmt: skip
    try:
        return onnx.load(str(file)).graph
    except Exception as error:
        raise CheckpointError(f"{file} can't be read: {error}", path=str(file)) from error


def _dense(stored: Mapping[str, Any], file: Path) -> Iterator[tuple[str, Tensor]]:
    """Each initialiser that may be a weight, with its own name; constants of the graph left out."""
    for name, item in stored.items():
        stem = name.removesuffix("_quantized")
        if stem != name:
            yield stem, _dequantised(stem, stored, file)
            continue
        helper = re.sub(r"_(scale|zero_point)$", "_quantized", name)
        tensor = _tensor(item)
        # Shapes, indices and single numbers are steps of the graph, not parameters.
        if (helper == name or helper not in stored) and tensor.is_floating_point() and tensor.ndim:
            yield name, tensor


def _tensor(item: Any) -> Tensor:
    from onnx import numpy_helper

    return torch.from_numpy(numpy_helper.to_array(item).copy())


def _dequantised(stem: str, stored: Mapping[str, Any], file: Path) -> Tensor:
    """(q - zero_point) * scale, per column or for the whole (ONNX's `DequantizeLinear`)."""
    parts = [stored.get(f"{stem}_{part}") for part in ("quantized", "scale", "zero_point")]
    if None in parts:
        raise CheckpointError(
            f"{file}: {stem}_quantized has no {stem}_scale or no {stem}_zero_point.",
            path=str(file), tensor=stem,
        )  # fmt: skip
    value, scale, zero = (_tensor(part) for part in parts)
    return (value.float() - zero.float()) * scale.float()


def _place(own: str, graph: Any) -> tuple[str, bool]:
    """The parameter's name of the initialiser `own`, and whether it is stored transposed."""
    node = next((n for n in graph.node if n.op_type in _MATRIX and len(n.input) > 1
                 and n.input[1].removesuffix("_quantized") == own), None)  # fmt: skip
    if node is None:
        return _WRAPPERS.sub("", own), False
    if own.endswith((".weight", ".bias")):
        turned = "Gemm_MatMul" in node.name and not _UNTURNED.search(own)
        return _WRAPPERS.sub("", own), turned
    module = _module(node)
    name = f"{module}.weight" if module else own
    return _WRAPPERS.sub("", name), not _UNTURNED.search(name)


def _module(node: Any) -> str | None:
    """Which module a node came from, from its scopes or from its name."""
    scopes = next((p.value for p in node.metadata_props if p.key == _SCOPES), None)
    if scopes is not None:
        named = [scope for scope in ast.literal_eval(scopes)[:-1] if scope]
        return str(named[-1]) if named else None
    path = node.name.strip("/").split("/")[:-1]
    return _joined(path) if path else None


def _joined(path: list[str]) -> str:
    """Dotted name from a node's path, whose parts repeat where lists are called by index
    (`layer/layer.0` and `model/model.0` name one step each)."""
    kept: list[str] = []
    for part in path:
        if kept and part.startswith(f"{kept[-1]}."):
            kept.pop()
        kept.append(part)
    return ".".join(kept)
