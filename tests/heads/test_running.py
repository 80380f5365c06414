# SPDX-License-Identifier: Apache-2.0
"""The executor against formulas written out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from headswap.heads import (
    Activation,
    Dense,
    Difference,
    Dropout,
    Field,
    HeadSpec,
    Softcap,
    family,
    run_head,
)
from headswap.registry import UnsupportedHeadError


class Holder(nn.Module):
    """Two linears, one of them below another module."""

    def __init__(self, out: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.ModuleDict({"dense": nn.Linear(8, 8)})
        self.out = nn.Linear(8, out)


def head(*layers: Any) -> HeadSpec:
    return HeadSpec("mine", "last", layers)


def states(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


ACTIVATIONS = {
    "tanh": torch.tanh,
    "relu": lambda x: x.clamp(min=0),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "linear": lambda x: x,
}


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_a_dense_head_is_its_formula(name: str) -> None:
    model, x = Holder(3).eval(), states(4, 8)
    found = run_head(model, head(Dense("base.dense"), Activation(name), Dense("out", "labels")), x)
    inner = x @ model.base["dense"].weight.T + model.base["dense"].bias
    wanted = ACTIVATIONS[name](inner) @ model.out.weight.T + model.out.bias
    torch.testing.assert_close(found, wanted)


def test_a_linear_without_bias_runs() -> None:
    model, x = Holder(), states(4, 8)
    model.out = nn.Linear(8, 1, bias=False)
    found = run_head(model, head(Dense("out", "labels", bias=False)), x)
    torch.testing.assert_close(found, (x * model.out.weight[0]).sum(-1, keepdim=True))


def test_a_bias_that_the_model_has_is_used_whatever_the_spec_says() -> None:
    model, x = Holder(), states(4, 8)
    found = run_head(model, head(Dense("out", "labels", bias=False)), x)
    torch.testing.assert_close(found, x @ model.out.weight.T + model.out.bias)


@given(st.floats(0.5, 50), st.lists(st.floats(-100, 100), min_size=1, max_size=6))
def test_a_softcap_is_its_formula_and_stays_below_the_cap(cap: float, raw: list[float]) -> None:
    x = torch.tensor([raw])
    found = run_head(nn.Module(), head(Softcap(cap)), x)
    torch.testing.assert_close(found, cap * torch.tanh(x / cap))
    assert found.abs().max() <= cap * (1 + 1e-6)


def test_each_column_is_capped_before_they_are_subtracted() -> None:
    x = torch.tensor([[4.0, 10.0], [9.0, -7.0], [0.0, 0.5]])
    found = run_head(nn.Module(), head(Softcap(3.0), Difference()), x)
    cap = 3 * torch.tanh(x / 3)
    torch.testing.assert_close(found, (cap[:, 1] - cap[:, 0]).unsqueeze(1))
    other = run_head(nn.Module(), head(Difference(), Softcap(3.0)), x)
    assert (found - other).abs().max() > 1


def test_a_difference_is_the_second_minus_the_first() -> None:
    found = run_head(nn.Module(), head(Difference()), torch.tensor([[1.0, 5.0], [2.0, -1.0]]))
    assert found.tolist() == [[4.0], [-3.0]]


def test_a_head_without_layers_widens_its_rows() -> None:
    x = states(2, 8).half()
    found = run_head(nn.Module(), head(), x)
    assert found.dtype == torch.float32
    assert torch.equal(found, x.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rows_and_weights_run_in_fp32(dtype: torch.dtype) -> None:
    model, x = Holder(3).to(dtype).eval(), states(4, 8).to(dtype)
    spec = head(Dense("base.dense"), Activation("tanh"), Dense("out", "labels"))
    found = run_head(model, spec, x)
    wide = Holder(3)
    wide.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    inner = torch.tanh(x.float() @ wide.base["dense"].weight.T + wide.base["dense"].bias)
    torch.testing.assert_close(found, inner @ wide.out.weight.T + wide.out.bias)
    assert found.dtype == torch.float32
    assert model.out.weight.dtype == dtype  # the module itself is left alone


def test_close_logits_of_a_bf16_model_stay_apart() -> None:
    model = Holder(1)
    with torch.no_grad():
        model.out.weight.zero_()[0, :2] = torch.tensor([1.0, 0.0078125])
        model.out.bias.zero_()
    rows = torch.zeros(3, 8)
    rows[:, 0] = 12
    rows[:, 1] = torch.tensor([0.0, 4.0, 8.0])
    found = run_head(model.bfloat16(), head(Dense("out", "labels")), rows.bfloat16())
    assert found.flatten().tolist() == [12.0, 12.03125, 12.0625]
    scores = torch.sigmoid(found)
    assert scores.unique().numel() == 3


def test_the_difference_of_two_bf16_columns_is_taken_in_fp32() -> None:
    model = Holder(2).bfloat16()
    with torch.no_grad():
        model.out.weight.mul_(100)
    x = states(16, 8).bfloat16()
    found = run_head(model, head(Dense("out", "labels"), Difference()), x)
    row = model.out.weight[1].double() - model.out.weight[0].double()
    wanted = x.double() @ row + (model.out.bias[1].double() - model.out.bias[0].double())
    torch.testing.assert_close(found[:, 0].double(), wanted, atol=1e-3, rtol=0)


@pytest.mark.parametrize("shape", [(8,), (0, 8), (3, 8), (2, 5, 8)])
def test_any_leading_shape_is_kept(shape: tuple[int, ...]) -> None:
    model, x = Holder(3).eval(), states(*shape)
    spec = head(Dense("base.dense"), Activation("tanh"), Dense("out", "labels"))
    found = run_head(model, spec, x)
    assert found.shape == (*shape[:-1], 3)
    flat = run_head(model, spec, x.reshape(-1, 8))
    torch.testing.assert_close(found.reshape(-1, 3), flat)


# -- dropout --------------------------------------------------------------------------------------


def test_dropout_is_nothing_in_eval_mode() -> None:
    x = states(4, 8)
    assert torch.equal(run_head(Holder().eval(), head(Dropout(0.9)), x), x)


def test_dropout_zeroes_and_rescales_in_training_mode() -> None:
    found = run_head(Holder().train(), head(Dropout(0.25)), torch.ones(400, 8))
    assert {round(value, 4) for value in found.unique().tolist()} == {0.0, round(4 / 3, 4)}
    assert (found == 0).float().mean().item() == pytest.approx(0.25, abs=0.05)


def test_dropout_of_rate_zero_is_nothing_in_training_mode() -> None:
    x = states(4, 8)
    assert torch.equal(run_head(Holder().train(), head(Dropout(0.0)), x), x)


def test_a_head_is_trainable() -> None:
    model = Holder(1).train()
    spec = head(Dropout(0.1), Dense("base.dense"), Activation("tanh"), Dense("out", "labels"))
    run_head(model, spec, states(4, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model.out.bias.grad.tolist() == [4.0]


# -- modules under a path -------------------------------------------------------------------------


class Wrapped(nn.Module):
    """As an adapter's layer: a frozen base and a low-rank addition."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, base.out_features)
        self.seen: list[torch.dtype] = []

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.dtype)
        found: Tensor = self.base_layer(x) + self.up(self.down(x))
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrapped_linear_is_called_and_not_unpacked(dtype: torch.dtype) -> None:
    model, x = Holder(), states(4, 8).to(dtype)
    model.out = Wrapped(model.out)
    model.to(dtype)
    found = run_head(model, head(Dense("out", "labels")), x)
    assert model.out.seen == [dtype]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, model.out(x).float())
    plain = x.float() @ model.out.weight.float().T + model.out.bias.float()
    assert (found - plain).abs().max() > 0.05


def test_a_layer_with_integer_weights_gets_fp32_rows() -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 8, dtype=torch.int8), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            assert x.dtype == torch.float32
            return x @ self.weight.to(x.dtype).T

    model, x = Holder(), states(4, 8)
    model.out = Quantised()
    found = run_head(model, head(Dense("out", "labels")), x.bfloat16())
    torch.testing.assert_close(found[:, 0], x.bfloat16().float().sum(-1))


def test_a_linear_reparametrised_by_torch_is_called() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    model, x = Holder(), states(4, 8)
    plain = run_head(model, head(Dense("out", "labels")), x) - model.out.bias
    nn.utils.parametrize.register_parametrization(model.out, "weight", Doubled())
    found = run_head(model, head(Dense("out", "labels")), x) - model.out.bias
    torch.testing.assert_close(found, 2 * plain)


# -- refusals -------------------------------------------------------------------------------------


def test_an_unknown_activation_lists_known_ones() -> None:
    with pytest.raises(UnsupportedHeadError, match=r"'nothing'.*'gelu'.*'tanh'"):
        run_head(Holder(), head(Activation("nothing")), states(1, 8))


def test_a_field_that_was_never_read_is_refused() -> None:
    with pytest.raises(UnsupportedHeadError, match="hidden_act"):
        run_head(Holder(), head(Activation(Field(("hidden_act",)))), states(1, 8))


def test_an_unknown_layer_is_refused_with_its_family() -> None:
    with pytest.raises(UnsupportedHeadError, match="'mine'"):
        run_head(Holder(), head("norm"), states(1, 8))


def test_a_path_that_leads_nowhere_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="missing"):
        run_head(Holder(), head(Dense("missing.dense")), states(1, 8))


# -- the table's own heads ------------------------------------------------------------------------


def test_the_bert_head_is_dense_tanh_dense() -> None:
    model = nn.Module()
    model.bert, model.classifier = nn.Module(), nn.Linear(8, 3)
    model.bert.pooler = nn.Module()
    model.bert.pooler.dense = nn.Linear(8, 8)
    x = states(4, 8)
    found = run_head(model.eval(), family("bert").spec(object(), base="bert"), x)
    torch.testing.assert_close(found, model.classifier(torch.tanh(model.bert.pooler.dense(x))))


def test_the_roberta_head_is_dense_tanh_projection() -> None:
    model = nn.Module()
    model.classifier = nn.Module()
    model.classifier.dense, model.classifier.out_proj = nn.Linear(8, 8), nn.Linear(8, 3)
    x = states(4, 8)
    found = run_head(model.eval(), family("roberta").spec(object()), x)
    inner = torch.tanh(model.classifier.dense(x))
    torch.testing.assert_close(found, model.classifier.out_proj(inner))
