# SPDX-License-Identifier: Apache-2.0
"""The device's numbers, the search for a stack, and the environment of the production one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headswap.registry.errors import HeadswapError
from headswap.spyre import device
from headswap.spyre.device import (
    DIALECTS,
    SENDNN,
    SPYRE,
    DeviceSpec,
    Stack,
    applied,
    detect,
    environment,
)
from headswap.spyre.errors import DeviceError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that exactly these packages can be imported."""

    def pretend(*names: str) -> None:
        def find(name: str) -> ModuleSpec | None:
            return ModuleSpec(name, None) if name in names else None

        monkeypatch.setattr(device, "find_spec", find)

    return pretend


@pytest.fixture
def sendnn(monkeypatch: pytest.MonkeyPatch) -> Callable[[], ModuleType]:
    """Import a stand-in for torch_sendnn when called; forgotten after the test."""

    def load() -> ModuleType:
        module = ModuleType("torch_sendnn")
        monkeypatch.setitem(sys.modules, "torch_sendnn", module)
        return module

    return load


@pytest.mark.parametrize("spec", [SENDNN, SPYRE], ids=lambda spec: spec.dialect)
def test_a_stick_is_128_bytes(spec: DeviceSpec) -> None:
    assert spec.stick == 64
    assert [spec.stick_elements(d) for d in ("bfloat16", "float32", "int32")] == [64, 32, 32]
    assert spec.stick_elements("float8_e4m3fn") == 128


def test_the_stacks_pad_on_opposite_sides() -> None:
    assert (SENDNN.pad_side, SPYRE.pad_side) == ("left", "right")


def test_each_dialect_names_its_stack_and_backend() -> None:
    assert DIALECTS["sendnn"].stack is Stack.SENDNN
    assert SENDNN.traits.compile_backend == "sendnn"
    assert SENDNN.traits.deploy_pass
    assert SPYRE.traits.stack is Stack.TORCH_SPYRE
    assert SPYRE.traits.tensor_device == "spyre"
    assert not SPYRE.traits.deploy_pass


def test_a_spec_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        SENDNN.block_size = 128  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "numbers"),
    [
        ({"block_size": 96}, ("96", "64")),
        ({"chunk": 500}, ("500", "64")),
        ({"max_batch": 0}, ("0", "1")),
        ({"max_volume": -1}, ("-1", "1")),
        ({"pad_side": "middle"}, ("middle", "left")),
        ({"dialect": "cuda"}, ("cuda", "sendnn, spyre")),
        ({"dtype": "int64"}, ("int64", "float16")),
    ],
)
def test_an_impossible_spec_says_what_was_asked_and_what_is_possible(
    change: dict[str, Any], numbers: tuple[str, str]
) -> None:
    with pytest.raises(DeviceError) as caught:
        replace(SENDNN, **change)
    assert all(number in str(caught.value) for number in numbers)
    assert isinstance(caught.value, HeadswapError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("names", "stack"),
    [
        ((), Stack.NONE),
        (("torch_spyre",), Stack.TORCH_SPYRE),
        (("torch_sendnn",), Stack.SENDNN),
        (("torch_spyre", "torch_sendnn"), Stack.SENDNN),
    ],
)
def test_detect_prefers_the_production_stack(
    installed: Callable[..., None], names: tuple[str, ...], stack: Stack
) -> None:
    installed(*names)
    assert detect() is stack


def test_detect_sees_a_module_that_is_already_there(
    installed: Callable[..., None], sendnn: Callable[[], ModuleType]
) -> None:
    installed()
    sendnn()
    assert detect() is Stack.SENDNN


def test_detect_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_spyre.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert detect() is Stack.TORCH_SPYRE
    assert "torch_spyre" not in sys.modules


def test_the_environment_carries_the_limits() -> None:
    assert environment(replace(SENDNN, max_context=8192, chunk=1024)) == {
        "VLLM_DT_CHUNK_LEN": "1024",
        "VLLM_DT_MAX_BATCH_SIZE": "32",
        "VLLM_DT_MAX_BATCH_TKV_LIMIT": "131072",
        "VLLM_DT_MAX_CONTEXT_LEN": "8192",
    }


def test_the_compiler_never_hears_of_a_maximum_below_two_rows() -> None:
    assert environment(replace(SENDNN, max_decode_batch=1))["VLLM_DT_MAX_BATCH_SIZE"] == "2"


def test_the_other_stack_reads_none_of_it() -> None:
    assert environment(SPYRE) == {}


def test_applied_sets_and_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSWAP_A", "before")
    monkeypatch.delenv("HEADSWAP_B", raising=False)
    with applied({"HEADSWAP_A": "1", "HEADSWAP_B": "2"}):
        assert (os.environ["HEADSWAP_A"], os.environ["HEADSWAP_B"]) == ("1", "2")
    assert os.environ["HEADSWAP_A"] == "before"
    assert "HEADSWAP_B" not in os.environ


def test_applied_restores_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADSWAP_A", raising=False)
    with pytest.raises(RuntimeError, match="inside"), applied({"HEADSWAP_A": "1"}):
        raise RuntimeError("inside")
    assert "HEADSWAP_A" not in os.environ


def test_the_same_values_again_are_fine(sendnn: Callable[[], ModuleType]) -> None:
    env = environment(SENDNN)
    with applied(env):
        sendnn()
    with applied(env):
        assert os.environ["VLLM_DT_MAX_CONTEXT_LEN"] == "32768"


def test_other_values_after_the_import_are_refused(sendnn: Callable[[], ModuleType]) -> None:
    with applied(environment(SENDNN)):
        sendnn()
    late = environment(replace(SENDNN, max_context=8192))
    with pytest.raises(DeviceError, match="was '32768', asked '8192'") as caught, applied(late):
        pass
    assert caught.value.variables == {"VLLM_DT_MAX_CONTEXT_LEN": ("32768", "8192")}
    assert "VLLM_DT_MAX_CONTEXT_LEN" not in os.environ


def test_an_import_by_somebody_else_counts_with_todays_environment(
    sendnn: Callable[[], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    sendnn()
    monkeypatch.delenv("VLLM_DT_CHUNK_LEN", raising=False)
    with (
        pytest.raises(DeviceError, match="VLLM_DT_CHUNK_LEN was None"),
        applied(environment(SENDNN)),
    ):
        pass
