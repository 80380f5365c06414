# SPDX-License-Identifier: Apache-2.0
"""A copy of a model that shares its weights: what is changed on it leaves the model as it was."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def shared_copy(module: Module) -> Module:
    """`module` with modules, configs and hooks of its own, around the same tensors."""
    shared = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in shared})
