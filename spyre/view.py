# SPDX-License-Identifier: Apache-2.0
"""A copy of a model that shares its weights: what is changed on it leaves the model as it was."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def shared_copy(module: Module) -> Module:
    """`module` with modules, configs and hooks of its own, around the same data; buffers that are
    no part of a checkpoint are its own, as RoPE writes into its frequencies in a run.

    Parameters are new objects on the same storage, since `Module.to` writes into the objects.
    """
    shared: dict[int, object] = {
        id(tensor): tensor
        for each in module.modules()
        for name, tensor in each.named_buffers(recurse=False)
        if name not in each._non_persistent_buffers_set
    }
    for parameter in module.parameters():
        plain = type(parameter) is nn.Parameter
        shared[id(parameter)] = (
            nn.Parameter(parameter.detach(), requires_grad=False) if plain else parameter
        )
    return copy.deepcopy(module, shared)
