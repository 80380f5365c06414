# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints: which stored tensors make which plain weight.

headswap runs plain weights, so quantised ones are dequantised while they are read, by the format's
own formula (`dequantise.py`), before transformers' loader sees them. So numbers don't depend on
kernels at hand, no head becomes quantised on the way, and the plan of a quantised checkpoint is
that of the plain one. What cannot be dequantised exactly is refused by the name of the tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from headswap.convert import dequantise
from headswap.convert.plan import TensorPlan
from headswap.convert.weights import Header
from headswap.registry.errors import CheckpointError

Parts = Mapping[str, Tensor]
"""The stored tensors of one weight, by their last name (`weight_packed`, `weight_scale`, ...)."""

# Numbers of quantised activations and caches; plain weights run with plain activations.
_ACTIVATIONS = re.compile(
    r"\.(activation_scale|[qkv]_(scale|zero_point)|(input|output)_(scale|zero_point|global_scale))$"
)
# What only a quantised weight has beside it, in any of the known formats.
_SIGNS = re.compile(
    r"\.(weight_packed|weight_scale(_inv)?|weight_shape|weight_zero_point|qweight|qzeros|scales|SCB|"
    r"absmax|_weight_qdata|weight\.quant_state\.\w+)$"
)
# Methods whose weights headswap cannot unpack, and the package that can.
_PACKAGES = {
    "gptq": "gptqmodel", "awq": "gptqmodel", "bitsandbytes": "bitsandbytes", "aqlm": "aqlm",
    "auto-round": "auto-round", "hqq": "hqq", "quark": "amd-quark", "eetq": "eetq",
    "quanto": "optimum-quanto", "fbgemm_fp8": "fbgemm-gpu", "fp_quant": "fp-quant",
    "higgs": "flute-kernel", "spqr": "spqr_quant", "vptq": "vptq", "sinq": "sinq",
    "mxfp4": "kernels",
}  # fmt: skip


@dataclass(frozen=True)
class Quantisation:
    """How a checkpoint's weights are stored.

    `parts`: plain name -> {last name -> stored name}; `shapes`: plain name -> shape; `ignored`:
    stored tensors that plain weights have no use for, each with the reason.
    """

    method: str
    parts: Mapping[str, Mapping[str, str]]
    shapes: Mapping[str, tuple[int, ...]]
    formula: Callable[[str, Parts], Tensor]
    ignored: Mapping[str, str] = field(default_factory=dict)

    def headers(self, stored: Mapping[str, Header]) -> dict[str, Header]:
        """Plain names, shapes and dtypes (fp32 for what is dequantised)."""
        gone = {name for parts in self.parts.values() for name in parts.values()}
        gone |= set(self.ignored)
        plain = {name: header for name, header in stored.items() if name not in gone}
        return {**plain, **{name: (shape, torch.float32) for name, shape in self.shapes.items()}}

    def plain(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Plain tensors from `stored` ones, dequantised to fp32."""
        rest, found = dict(stored), {}
        for name in self.ignored:
            rest.pop(name)
        for name, parts in self.parts.items():
            found[name] = self._weight(name, {leaf: rest.pop(at) for leaf, at in parts.items()})
        return {**rest, **found}

    def _weight(self, name: str, parts: Parts) -> Tensor:
        try:
            weight = self.formula(name, parts).float().contiguous()
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{name} ({', '.join(parts)}) can't be dequantised as {self.method}: {error}",
                tensor=name,
            ) from error
        if tuple(weight.shape) != self.shapes[name]:
            raise CheckpointError(
                f"{name}: dequantised as {self.method} its shape is {list(weight.shape)}, not "
                f"{list(self.shapes[name])} as its stored parts say.",
                tensor=name,
            )
        return weight

    def as_stored(self, plan: list[TensorPlan], stored: Mapping[str, Header]) -> list[TensorPlan]:
        """`plan` of plain names, with the stored parts of each weight in its place."""
        found = []
        for tensor in plan:
            reason = f"{tensor.reason}; dequantised into {tensor.name}".removeprefix("; ")
            named = self.parts.get(tensor.name)
            found += [tensor] if named is None else [
                replace(tensor, name=name, shape=stored[name][0], reason=reason)
                for name in sorted(named.values())
            ]  # fmt: skip
        return found + [TensorPlan(name, "dropped", stored[name][0], reason)
                        for name, reason in sorted(self.ignored.items())]  # fmt: skip

    @property
    def notes(self) -> tuple[str, ...]:
        """What a plan says about it."""
        if not self.parts:
            return ()
        text = f"{len(self.parts)} weights dequantised from {self.method}"
        return (text + ("; activations run unquantised" if self.ignored else ""),)


def settings_of(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantisation settings in a stored config, wherever they lie; None for plain weights."""
    inner = raw.get("text_config") or {}
    for config in (raw, inner if isinstance(inner, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            if config.get(key):
                found: Mapping[str, Any] = config[key]
                return found
    return None


def forget_settings(config: Any) -> None:
    """Take the settings out of a config, whose weights will be plain ones."""
    for part in (config, config.get_text_config()):
        for key in ("quantization_config", "compression_config"):
            getattr(part, "__dict__", {}).pop(key, None)  # an inner one may be a plain object


def make_readable(raw: Mapping[str, Any]) -> None:
    """Let torch unpickle the tensor classes of the library that wrote the files, if any."""
    if (settings_of(raw) or {}).get("quant_method") == "torchao":
        dequantise.require("torchao")


def quantisation(
    raw: Mapping[str, Any],
    stored: Mapping[str, Header],
    read: Callable[[Callable[[str], bool]], Mapping[str, Tensor]],
    metadata: Callable[[], Mapping[str, str]],
    name: str,
) -> Quantisation | None:
    """How the weights of the checkpoint `name` are stored; None for plain ones.

    `read` gives the stored tensors whose names a function picks (asked for shapes only), `metadata`
    that of the safetensors files. Raises `CheckpointError` for a method or a tensor that
    headswap cannot dequantise.
    """
    settings = settings_of(raw)
    if settings is None:
        sign = next((tensor for tensor in stored if _SIGNS.search(tensor)), None)
        if sign is not None:
            raise CheckpointError(
                f"{name} stores {sign}, a part of a quantised weight, but config.json has no "
                "quantization_config that says how. Add it.",
                path=name,
                tensor=sign,
            )
        return None
    method = str(settings.get("quant_method"))
    if method not in _METHODS:
        raise unsupported(name, method, settings)
    found = _METHODS[method](settings, stored, read, metadata)
    _check_rest(found, stored, name)
    return found


def unsupported(name: str, method: str, settings: Mapping[str, Any]) -> CheckpointError:
    """The refusal of a method: what it is, what reads it, what headswap reads."""
    package = _PACKAGES.get(method)
    bits = settings.get("bits") or settings.get("w_bit")
    what = f"{method} ({bits} bits)" if bits else method
    reader = f" with the package {package} (pip install {package})" if package else ""
    return CheckpointError(
        f"{name}: its weights are quantised by {what}, which headswap does not unpack. It reads "
        f"{', '.join(_METHODS)}. Load the model with transformers{reader}, call "
        "model.dequantize(), save it without quantization_config, and convert that.",
        path=name,
        method=method,
        package=package,
    )


def _check_rest(found: Quantisation, stored: Mapping[str, Header], name: str) -> None:
    """Refuse what looks quantised and would reach the loader as if it were plain."""
    for tensor, (_, dtype) in found.headers(stored).items():
        if tensor in found.shapes:
            continue
        packed = tensor.endswith(".weight") and (not dtype.is_floating_point or dtype.itemsize < 2)
        if packed or _SIGNS.search(tensor):
            raise CheckpointError(
                f"{name}: {tensor} ({dtype}) is a quantised tensor without its other parts, so "
                f"{found.method} cannot dequantise it.",
                path=name,
                tensor=tensor,
            )


def _ignored(stored: Mapping[str, Header]) -> dict[str, str]:
    reason = "scale of quantised activations, which run unquantised"
    return {name: reason for name in stored if _ACTIVATIONS.search(name)}


def _grouped(stored: Mapping[str, Header], sign: str, leaves: frozenset[str]) -> dict[str, Any]:
    """Plain name -> {last name -> stored name}, for modules that store a `sign`."""
    found: dict[str, dict[str, str]] = {}
    for name in stored:
        stem, _, leaf = name.rpartition(".")
        if leaf in leaves and f"{stem}.{sign}" in stored:
            found.setdefault(f"{stem}.weight", {})[leaf] = name
    return found


def _compressed_tensors(
    settings: Mapping[str, Any], stored: Mapping[str, Header], read: Any, _: Any
) -> Quantisation:
    scheme = dequantise.compressed_tensors(settings)
    parts = _grouped(stored, "weight_scale", dequantise.COMPRESSED_PARTS)
    for name, named in parts.items():
        header = stored.get(named.get("weight", ""))
        if header is not None and header[1].is_floating_point and header[1].itemsize > 1:
            raise CheckpointError(
                f"{name} is stored as {header[1]} beside a scale: it is not compressed. Compress "
                "the checkpoint, or fold the rounding into its weights.",
                tensor=name,
            )
    shapes = read(lambda name: name.endswith(".weight_shape"))
    return Quantisation(
        f"compressed-tensors ({settings.get('format')})",
        parts,
        {name: tuple(shapes[named["weight_shape"]].tolist()) if "weight_shape" in named
         else stored[named["weight"]][0] for name, named in parts.items()},
        scheme,
        _ignored(stored),
    )  # fmt: skip


def _fine_grained_fp8(
    settings: Mapping[str, Any], stored: Mapping[str, Header], _: Any, __: Any
) -> Quantisation:
    parts = _grouped(stored, "weight_scale_inv", frozenset({"weight", "weight_scale_inv"}))
    return Quantisation(
        "fine-grained fp8",
        parts,
        {name: stored[name][0] for name in parts},
        dequantise.fine_grained_fp8(settings.get("weight_block_size")),
        _ignored(stored),
    )


def _torchao(
    _: Mapping[str, Any], stored: Mapping[str, Header], read: Any, metadata: Any
) -> Quantisation:
    about = metadata()
    parts = dequantise.torchao_parts(about)
    if "tensor_names" not in about:  # pickled: the weights are torchao's own tensors
        tensors = read(lambda name: True)
        parts = {name: {name.rpartition(".")[2]: name} for name, tensor in tensors.items()
                 if type(tensor) is not Tensor}  # fmt: skip
    return Quantisation(
        "torchao",
        parts,
        {name: stored[named.get("qdata", name)][0] for name, named in parts.items()},
        dequantise.torchao(about),
    )


_METHODS: Mapping[str, Callable[[Any, Any, Any, Any], Quantisation]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fine_grained_fp8,
    "torchao": _torchao,
}
