# SPDX-License-Identifier: Apache-2.0
"""How a backend's name becomes a graph compiler: on this machine's CPU, or by a card's stack."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Literal, cast, get_args

from headswap.spyre.compiling import GraphBackend
from headswap.spyre.device import (
    DIALECTS,
    SENDNN,
    SPYRE,
    DeviceSpec,
    DialectName,
    Stack,
    applied,
    detect,
    environment,
)
from headswap.spyre.errors import DeviceError

BackendName = Literal["eager", "inductor", "checked", "sendnn", "spyre"]
SPECS: dict[DialectName, DeviceSpec] = {"sendnn": SENDNN, "spyre": SPYRE}


@dataclass(frozen=True, slots=True)
class Backend:
    """A chosen backend.

    compiler  what compiles a graph; None runs the layers as they are
    spec      the card's limits that shapes must respect
    module    the imported stack, on a card
    rules     what becomes of a finding: "raise", "warn" or "record"
    """

    name: BackendName
    spec: DeviceSpec
    compiler: GraphBackend | None
    module: Any = None
    rules: str = "raise"

    @property
    def ruled(self) -> bool:
        """Whether a card's rules are looked at."""
        return self.name not in ("eager", "inductor")

    @property
    def on_card(self) -> bool:
        """Whether graphs go to a card."""
        return self.module is not None

    @property
    def device(self) -> str:
        """Where a layer's weights and inputs live; sendnn ships them itself."""
        return self.spec.traits.tensor_device if self.on_card else "cpu"

    def warming(self) -> Any:
        """The context in which a stack compiles; it does so when the context ends."""
        mode = getattr(self.module, "warmup_mode", None)
        return mode() if mode is not None else nullcontext()

    @property
    def deploys(self) -> bool:
        """Whether one more run after that context puts the program on the card."""
        return self.on_card and self.spec.traits.deploy_pass


def choose(name: str, spec: DeviceSpec | None, rules: str) -> Backend:
    """The backend called `name`; "auto" takes a card's stack where one is installed, else eager.

    Raises `DeviceError` for an unknown name and for a stack that is not installed.
    """
    known = get_args(BackendName)
    if name == "auto":
        found = detect()
        name = next((d.name for d in DIALECTS.values() if d.stack is found), "eager")
    if name not in known:
        raise DeviceError(f"Unknown backend {name!r}; known: auto, {', '.join(known)}.", name=name)
    if name in DIALECTS:
        return _card(cast(DialectName, name), spec, rules)
    own = spec or SPYRE
    return Backend(cast(BackendName, name), own, _cpu(name, own, rules), rules=rules)


def _cpu(name: str, spec: DeviceSpec, rules: str) -> GraphBackend | None:
    if name == "eager":
        return None
    if name == "checked":
        from headswap.spyre.checker import RulesBackend

        return RulesBackend(spec, then="eager", on_violation=rules)  # type: ignore[arg-type]
    from torch._inductor.compile_fx import compile_fx

    return cast(GraphBackend, compile_fx)


def _card(name: DialectName, spec: DeviceSpec | None, rules: str) -> Backend:
    dialect = DIALECTS[name]
    own = spec or SPECS[name]
    if own.dialect != name:
        raise DeviceError(f"backend={name!r} with limits of dialect {own.dialect!r}.", name=name)
    with _imported(dialect.stack, own) as module:
        from torch._dynamo import lookup_backend

        compiler = partial(lookup_backend(dialect.compile_backend), **dialect.compile_arguments)
        return Backend(name, own, compiler, module, rules)


@contextmanager
def _imported(stack: Stack, spec: DeviceSpec) -> Iterator[Any]:
    """The stack's module, its environment set before the first import, which is when it is read."""
    from importlib.util import find_spec

    if stack.value not in sys.modules and find_spec(stack.value) is None:
        raise DeviceError(
            f"backend={spec.dialect!r} needs {stack.value}, which is not installed here. "
            "backend='checked' runs the same graphs on the CPU, under the card's rules.",
            name=spec.dialect,
        )
    with applied(environment(spec)):
        yield import_module(stack.value)


def refuse_pages(backend: Backend) -> None:
    """Raise `DeviceError` where the paged cache would have to live on the device: ours lies on the
    host, where sendnn takes it from."""
    if backend.device != "cpu":
        raise DeviceError(
            f"backend={backend.name!r} keeps tensors on the device, and the paged cache lies on "
            "the host: generate() and share_prefixes do not run there. Run rectangles.",
            name=backend.name,
        )  # fmt: skip
