# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: what is split stays with transformers, the head is whole on every rank.

All ranks make the same calls in the same order; fetching rows and settling a head are collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headswap.heads import release
from headswap.registry.errors import ConversionError, UnsupportedHeadError

# What transformers notes on a model that it split, and needs again to save it.
_NOTES = ("_device_mesh", "_mesh_manager", "_tp_size", "_is_distributed_loading_by_transformers")


TpPlan = str | Mapping[str, str] | None
"""`"auto"` for a class's own plan, or rules that change it (transformers 5)."""


def loader_options(tp_plan: TpPlan, device: Any) -> dict[str, Any]:
    """`tp_plan` in the words of the installed transformers' `from_pretrained`."""
    if tp_plan is None:
        return {}
    if device is not None:
        raise ConversionError(
            f"tp_plan places each rank's part itself; leave out device={device!r}.", device=device
        )
    if release() < 5:
        return {"tp_plan": tp_plan}
    config: Any = import_module("transformers.distributed").DistributedConfig
    return {"distributed_config": config(tp_plan=tp_plan)}


def rows_of(tensor: Any, index: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Rows `index` (int64 `[n]`) of a weight or bias of `shape`, plain fp32, whole on every rank.

    Of a split tensor each rank gives the rows, or the columns of them, that it holds. Raises
    `UnsupportedHeadError` for a part of a tensor that does not say which, and for other splits.
    """
    if tuple(tensor.shape) != shape:
        raise UnsupportedHeadError(
            f"The output matrix has shape {list(tensor.shape)} where its module says {list(shape)}:"
            " it is packed, or a part of a matrix whose other parts headswap cannot find. Load the "
            "model unpacked and with transformers' own tp_plan.",
            shape=tuple(tensor.shape),
        )
    if not hasattr(tensor, "placements"):
        return tensor.detach().index_select(0, index).float()  # type: ignore[no-any-return]
    dtensor: Any = import_module("torch.distributed.tensor")
    mesh, local = tensor.device_mesh, tensor.detach().to_local()
    placement, *others = tensor.placements
    if others or type(placement) not in (dtensor.Shard, dtensor.Replicate):
        raise UnsupportedHeadError(
            f"The output matrix is split as {tensor.placements}; headswap reads what is whole or "
            "split along one dimension. Load with transformers' own tp_plan.",
            shape=shape,
        )
    if placement.is_shard() and placement.dim % len(shape) == 0:
        rows = _own(local, index, -(-shape[0] // mesh.size()) * mesh.get_local_rank())
        placement = dtensor.Partial()
    else:
        rows = local.index_select(0, index).float()
    size = torch.Size((len(index), *shape[1:]))
    stride = torch.empty(size, device="meta").stride()
    parts = dtensor.DTensor.from_local(rows, mesh, [placement], shape=size, stride=stride)
    return parts.full_tensor()  # type: ignore[no-any-return]


def _own(local: Tensor, index: Tensor, first: int) -> Tensor:
    """Rows `index` of a matrix of which `local` is the part from row `first` on; others zero."""
    held = (index >= first) & (index < first + local.shape[0])
    rows = local.new_zeros((len(index), *local.shape[1:]), dtype=torch.float32)
    rows[held] = local[index[held] - first].float()
    return rows


def mesh_of(model: nn.Module) -> Any:
    """The mesh that `model` is split over, None for a whole model.

    Raises `ConversionError` where layers, experts or the data are split too.
    """
    layout = getattr(getattr(model, "config", None), "distributed_config", None)
    sizes = [getattr(layout, f"{kind}_size", 1) for kind in ("dp", "pp", "ep")]
    mesh = next((p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")), None)
    if max(sizes) > 1 or (mesh is not None and mesh.ndim > 1):
        raise ConversionError(
            f"{type(model).__name__} is split by data, layers or experts ({layout or mesh}); "
            "headswap converts what tensor parallelism alone splits. Load with tp_plan only.",
            layout=layout,
        )
    return mesh


def share_split(
    model: Any, shared: nn.Module, source: PreTrainedModel, original: nn.Module
) -> None:
    """Make `shared`, a copy of `source`'s backbone `original`, as split as that is, in `model`.

    transformers 5 replaces the forwards of split modules by functions that hold the module they
    were made for; each copy gets its own.
    """
    mesh = mesh_of(source)
    if mesh is None:
        return
    for name in _NOTES:
        if hasattr(source, name):
            setattr(model, name, getattr(source, name))
    replaced = [name for name, module in original.named_modules() if "forward" in vars(module)]
    if not replaced:
        return
    styles: Any = import_module("transformers.distributed.tensor_parallel").ALL_PARALLEL_STYLES
    plan = cast(Any, source)._resolve_parallel_plans(source.config.distributed_config)[0]
    names = {module: name for name, module in source.named_modules()}
    for name in replaced:
        copy = shared.get_submodule(name)
        del copy.forward
        styles[plan[names[original.get_submodule(name)]]].install_forward(copy, mesh)


@torch.no_grad()
def settle(model: Any) -> None:
    """Give every rank the first rank's head, since each drew its own random numbers."""
    mesh = mesh_of(model)
    if mesh is None:
        return
    first = torch.distributed.get_global_rank(mesh.get_group(), 0)
    tensors = model.state_dict()
    for name in model.head_spec.tensors():
        torch.distributed.broadcast(tensors[name], src=first, group=mesh.get_group())
