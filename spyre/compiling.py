# SPDX-License-Identifier: Apache-2.0
"""Compiling the layers of a backbone, one graph for all that are alike, and nothing after warm-up.

The host runs what is between the layers: embeddings, positions, masks, rotation tables and the last
norm; integers never reach the compiled graph. This is one recipe for both transformers releases
(4.57's BERT takes no mask of four dimensions, its layers do).
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from headswap.spyre.errors import CompileError

GraphBackend = Callable[[Any, list[Any]], Callable[..., Any]]
"""What `torch.compile` calls with a graph and its example inputs."""


class Guarded:
    """A graph compiler that counts what it compiles and refuses to once it is frozen."""

    def __init__(self, compiler: GraphBackend) -> None:
        self._compiler = compiler
        self.compiles = 0
        self.running = "warm-up"
        self.frozen = False
        self.planned = ""

    def __call__(self, graph: Any, inputs: list[Any]) -> Callable[..., Any]:
        """Compile `graph`; `CompileError` after the warm-up."""
        if self.frozen:
            raise CompileError(
                f"A graph would be compiled for {self.running} after warm-up; planned were "
                f"{self.planned}. Plan that shape, and warm up again.",
                shape=self.running,
            )
        self.compiles += 1
        return self._compiler(graph, inputs)


def outer_layers(backbone: nn.Module) -> list[nn.Module]:
    """The layers that `backbone` runs one after the other: what its outermost lists hold."""
    found: list[nn.Module] = []
    for child in backbone.children():
        if isinstance(child, nn.ModuleList):
            found.extend(layer for layer in child if any(True for _ in layer.parameters()))
        else:
            found.extend(outer_layers(child))
    return found


def compile_layers(
    backbone: nn.Module, compiler: Guarded, limit: int, device: str = "cpu",
    first: Callable[[nn.Module, Callable[..., Any]], Callable[..., Any]] | None = None,
) -> int:  # fmt: skip
    """Have every outer layer of `backbone` run compiled, static in shape and in one graph each;
    returns how many there are.

    Weights are inputs of the graph, so layers of one kind share it. `limit` graphs at most. The
    code object is this executor's own: torch keeps graphs by code object, and ten executors in
    one process must not use up each other's room. Weights and inputs go to `device`; states stay
    there from layer to layer, and the last layer's come back to the host. `first` gets the first
    layer and what runs it, and gives what runs in its place.
    """

    def run(layer: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        return layer(*arguments, **keywords)

    own = types.FunctionType(run.__code__.replace(co_name="run_layer"), run.__globals__)
    compiled = torch.compile(own, backend=compiler, fullgraph=True, dynamic=False)
    layers = outer_layers(backbone)
    for layer in layers:
        inner = copy.copy(layer)  # its forward is still the class's
        run_layer: Callable[..., Any] = partial(_limited, compiled, limit, inner)
        if device != "cpu":
            inner.to(device)
            run_layer = partial(_on_device, run_layer, device, layer is layers[-1])
        if first is not None and layer is layers[0]:
            run_layer = first(inner, run_layer)
        layer.forward = run_layer
    return len(layers)


def _on_device(run: Callable[..., Any], device: str, last: bool, *given: Any, **named: Any) -> Any:
    """`run` with its tensors on `device`, and of the last layer what it gives on the host."""
    found = run(*_moved(given, device), **_moved(named, device))
    return _moved(found, "cpu") if last else found


def _moved(values: Any, device: str) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), values)


def _limited(compiled: Any, limit: int, layer: nn.Module, *given: Any, **keywords: Any) -> Any:
    with torch._dynamo.config.patch(
        recompile_limit=limit, accumulated_recompile_limit=8 * limit,
        suppress_errors=False,
    ):  # fmt: skip
        return compiled(layer, *given, **keywords)


@contextmanager
def alone(*, compiled: bool) -> Iterator[None]:
    """No gradients, and nothing of the caller's modes: autocast would change numbers, and a graph
    that was compiled under inference mode runs under no other."""
    with torch.inference_mode(not compiled), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


@contextmanager
def explained(compiler: Guarded, model: Any) -> Iterator[None]:
    """Turn dynamo's errors into `CompileError`, with the shape that ran; let ours through."""
    from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    from headswap.registry.errors import HeadswapError

    try:
        yield
    except BackendCompilerFailed as error:
        inner = getattr(error, "inner_exception", None) or error.__cause__
        if isinstance(inner, HeadswapError):
            raise inner from None
        raise CompileError(
            f"Compiling {type(model).__name__} for {compiler.running} failed: {inner}",
            shape=compiler.running,
        ) from error
    except (TorchDynamoException, GuardOnDataDependentSymNode) as error:
        raise CompileError(
            f"{type(model).__name__} does not compile as one graph for {compiler.running}: "
            f"{str(error).strip().splitlines()[0]} Run it with backend='eager'.",
            shape=compiler.running,
        ) from error
