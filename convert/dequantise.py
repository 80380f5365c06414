# SPDX-License-Identifier: Apache-2.0
"""Formulas from stored parts to plain weights, one for each quantisation method.

Each function here takes a checkpoint's settings and gives a function of a weight's name and its
parts (by last name) that returns the plain weight `[out, in]`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from headswap.registry.errors import CheckpointError

Formula = Callable[[str, Mapping[str, Tensor]], Tensor]

COMPRESSED_PARTS = frozenset({"weight", "weight_packed", "weight_scale", "weight_zero_point",
                              "weight_shape", "weight_g_idx"})  # fmt: skip
_COMPRESSED_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


def compressed_tensors(settings: Mapping[str, Any]) -> Formula:
    """The library's own `decompress`, with the scheme of the group that a module belongs to.

    Settings that change more than single weights (sparsity, transforms) are refused.
    """
    config = _compressed_config(settings)
    from compressed_tensors.compressors import BaseCompressor

    for key in ("sparsity_config", "transform_config"):
        found = settings.get(key) or {}
        if found and found.get("format", key) != "dense":
            raise CheckpointError(f"compressed-tensors with a {key} is not supported: {found}.")

    def formula(name: str, parts: Mapping[str, Tensor]) -> Tensor:
        scheme = _scheme(name.removesuffix(".weight"), config)
        form = getattr(scheme.format, "value", scheme.format) or config.format
        if form not in _COMPRESSED_FORMATS:
            raise CheckpointError(
                f"{name} is stored as {form}; headswap reads {', '.join(_COMPRESSED_FORMATS)}.",
                tensor=name,
            )
        decompress: Any = BaseCompressor.get_value_from_registry(form).decompress
        weight: Tensor = decompress({n: _one_row(part) for n, part in parts.items()}, scheme)[
            "weight"
        ]
        return weight

    return formula


def _one_row(part: Tensor) -> Tensor:
    """`part` with a stride that lets the library view its transpose as bytes, for a single row (the
    packed zero points of eight labels); with torch's usual one it raises."""
    return part.as_strided(part.shape, (1, 1)) if part.ndim == 2 and len(part) == 1 else part


def _compressed_config(settings: Mapping[str, Any]) -> Any:
    require("compressed-tensors")
    from compressed_tensors.quantization import QuantizationConfig

    known = {key: settings[key] for key in QuantizationConfig.model_fields if key in settings}
    return QuantizationConfig.model_validate(known)


def _scheme(module: str, config: Any) -> Any:
    """The one scheme whose targets name `module`, else the one for all linear layers."""
    from compressed_tensors.utils.match import match_name

    groups = list(config.config_groups.values())
    named = [g for g in groups if any(match_name(module, target) for target in g.targets)]
    found = named or [group for group in groups if "Linear" in group.targets] or groups
    if len(found) != 1:
        raise CheckpointError(
            f"{module}.weight: {len(found)} groups of quantization_config fit it, so its format is "
            "not certain.",
            tensor=f"{module}.weight",
        )
    return found[0]


def fine_grained_fp8(block: Sequence[int] | None) -> Formula:
    """`weight * scale`, each block of rows and columns with a scale of its own.

    One scale for the whole where `block` is None. Source: DeepSeek-V3's README_WEIGHTS.
    """

    def formula(name: str, parts: Mapping[str, Tensor]) -> Tensor:
        weight, scale = parts["weight"].float(), parts["weight_scale_inv"].float()
        if block is None:
            if scale.numel() != 1:
                raise CheckpointError(f"{name}: {scale.numel()} scales and no weight_block_size.",
                                      tensor=name)  # fmt: skip
            return weight * scale.reshape(())
        for size, step, count in zip(weight.shape, block, scale.shape, strict=True):
            if -(-size // step) != count:
                raise CheckpointError(
                    f"{name}: scales {list(scale.shape)} do not fit its shape "
                    f"{list(weight.shape)} in blocks of {list(block)}.",
                    tensor=name,
                )
        wide = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        return weight * wide[: weight.shape[0], : weight.shape[1]]

    return formula


def torchao_parts(metadata: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Plain name -> {part -> stored name}, as the safetensors files' metadata describe them."""
    found: dict[str, dict[str, str]] = {}
    for name in json.loads(metadata.get("tensor_names", "[]")):
        described = json.loads(metadata[name])
        if described["_type"] == "Tensor":
            continue
        stem, _, leaf = name.rpartition(".")
        found[name] = {part: f"{stem}._{leaf}_{part}" for part in described["_tensor_data_names"]}
    return found


def torchao(metadata: Mapping[str, str]) -> Formula:
    """The library's own tensor, put together from its parts (or pickled whole), and its
    `dequantize`."""
    require("torchao")
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    def formula(name: str, parts: Mapping[str, Tensor]) -> Tensor:
        stem, _, leaf = name.rpartition(".")
        made: Any = parts.get(leaf)
        if made is None:
            stored = {f"{stem}._{leaf}_{part}": tensor for part, tensor in parts.items()}
            about = {"tensor_names": json.dumps([name]), name: metadata[name]}
            made = unflatten_tensor_state_dict(stored, about)[0][name]
        weight: Tensor = made.dequantize()
        return weight

    return formula


def require(package: str) -> Any:
    """The module of `package` (as pip calls it); `CheckpointError` if it can't be imported."""
    try:
        return importlib.import_module(package.replace("-", "_"))
    except ImportError as error:
        raise CheckpointError(
            f"The weights are quantised, and reading them needs the package {package}: {error}. "
            f"Install it with: pip install {package}",
            package=package,
        ) from error
