# SPDX-License-Identifier: Apache-2.0
"""In which numbers an executor runs: chosen by the machine, or int8 products whose cost is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from spyre_models import causal, converted, expected, greedy
from torch import nn

from headswap.spyre import DeviceError, Executor
from headswap.spyre.learning import probe_rows
from headswap.spyre.precision import capabilities
from headswap.spyre.products import Int8Linear

IDS = [[5, 6, 7, 8, 9, 10, 11], [5, 6], [9, 8, 7, 6]]
vnni = pytest.mark.skipif(not capabilities().get("avx512_vnni"), reason="no AVX-512 VNNI here")


@pytest.mark.parametrize(
    ("units", "wanted"),
    [({"amx_bf16": True, "avx512_bf16": True}, torch.bfloat16),
     ({"avx512_bf16": True}, torch.bfloat16), ({"bf16": True}, torch.bfloat16),
     ({"avx512_vnni": True, "amx_bf16": False}, torch.float32), ({}, torch.float32)],
)  # fmt: skip
def test_auto_takes_what_the_cpu_has_units_for(
    units: dict[str, bool], wanted: torch.dtype, monkeypatch: Any
) -> None:
    monkeypatch.setattr("headswap.spyre.precision.capabilities", lambda: units)
    executor = Executor(converted("bert"), backend="eager", dtype="auto")
    assert executor.prepared.dtype is wanted
    said = executor.report()["passes"]["dtype"]
    assert "this CPU has" in said
    assert all(name in said for name, there in units.items() if there and wanted != torch.float32
               and name == next(iter(units)))  # fmt: skip


def test_auto_widens_a_model_in_a_dtype_that_the_cpu_has_no_units_for(monkeypatch: Any) -> None:
    import copy

    monkeypatch.setattr("headswap.spyre.precision.capabilities", dict)
    model = copy.deepcopy(converted("bert"))
    model.backbone.to(torch.bfloat16)
    assert Executor(model, backend="eager", dtype="auto").prepared.dtype is torch.float32


@pytest.mark.parametrize("dtype", ["float32", "bf16", torch.int32, 16, torch.float8_e4m3fn])
def test_a_dtype_that_nothing_runs_in_is_refused_by_name(dtype: Any) -> None:
    with pytest.raises(DeviceError, match=r"torch\.int8 and .auto."):
        Executor(converted("bert"), backend="eager", dtype=dtype)


def test_int8_is_refused_where_layers_are_compiled() -> None:
    with pytest.raises(DeviceError, match="'inductor'"):
        Executor(converted("bert"), backend="inductor", shapes=[(1, 64)], dtype=torch.int8)


def test_int8_is_refused_on_a_cpu_whose_sums_saturate(monkeypatch: Any) -> None:
    monkeypatch.setattr("headswap.spyre.precision.capabilities", lambda: {"avx2": True})
    with pytest.raises(DeviceError, match="VNNI"):
        Executor(converted("bert"), backend="eager", dtype=torch.int8)


@vnni
@given(
    width=some.integers(1, 200),
    out=some.integers(1, 80),
    tokens=some.integers(1, 30),
    bias=some.booleans(),
    size=some.sampled_from((1e-4, 1.0, 1e4)),
)
@settings(deadline=None, max_examples=60)
def test_int8_products_are_those_of_rounded_numbers(
    width: int, out: int, tokens: int, bias: bool, size: float
) -> None:
    torch.manual_seed(width)
    layer, states = nn.Linear(width, out, bias=bias), torch.randn(2, tokens, width) * size
    states[0, 0] = 0

    def rounded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = (rows.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-32)
        return (rows / scale).round(), scale

    weight, by_output = rounded(layer.weight.detach())
    own, by_token = rounded(states)
    assert own.abs().max() <= 127
    wanted = (own.double() @ weight.double().T) * by_token * by_output.T
    if bias:
        wanted = wanted + layer.bias.detach()
    with torch.no_grad():
        int8 = Int8Linear(layer)
        found = int8(states)
        assert torch.equal(int8(states[1:, -1:]), found[1:, -1:])  # whatever the other tokens are
    assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-5 * size)


@vnni
@pytest.mark.parametrize("kind", ["bert", "llama", "modernbert", "qwen2"])
def test_int8_logits_are_near_and_no_text_depends_on_its_neighbours(kind: str) -> None:
    model = converted(kind)
    executor = Executor(model, backend="eager", dtype=torch.int8)
    found = executor.logits(IDS)
    own = expected(model, IDS)
    assert 0 < (found - own).abs().max() < 0.1 * own.abs().max()
    assert torch.allclose(executor.logits(IDS[:1])[0], found[0], atol=2e-3)
    assert executor.report()["passes"]["linears"].endswith("%")


@vnni
def test_int8_keeps_a_row_that_is_no_number_and_its_neighbours_apart() -> None:
    import copy

    model = copy.deepcopy(converted("bert"))
    with torch.no_grad():
        model.backbone.embeddings.word_embeddings.weight[77] = float("nan")
    executor = Executor(model, backend="eager", dtype=torch.int8)
    with pytest.raises(Exception, match=r"Rows \[1\]") as caught:
        executor.logits([IDS[0], [5, 77, 6], IDS[2]])
    good = caught.value.values[[0, 2]]  # type: ignore[attr-defined]
    assert torch.allclose(good, executor.logits([IDS[0], IDS[2]]), atol=2e-3)


@vnni
def test_int8_is_refused_for_a_backbone_without_linear_layers() -> None:
    with pytest.raises(DeviceError, match="GPT2Model has no linear layer"):
        Executor(converted("gpt2"), backend="eager", dtype=torch.int8)


@vnni
def test_generate_runs_with_int8_layers() -> None:
    model = causal("llama")
    prompts = [row.tolist() for row in probe_rows(model.config, (7, 5))]
    found = Executor(model, backend="eager", dtype=torch.int8).generate(prompts, 3)
    assert [len(row) for row in found] == [len(row) for row in greedy(model, prompts, 3)]
