# SPDX-License-Identifier: Apache-2.0
"""Products that take an activation with them, that several layers share, or that few tokens meet
in the plain layout: the numbers stay, and what may not be joined is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from spyre_models import causal, converted, greedy
from torch import Tensor, nn

from headswap.spyre import Executor
from headswap.spyre.calls import Calls
from headswap.spyre.learning import probe_rows
from headswap.spyre.linears import _laid, _put
from headswap.spyre.products import (
    ACTIVATIONS,
    JointLinear,
    LaidLinear,
    PackedLinear,
    joined,
    usable,
)

pytestmark = pytest.mark.skipif(not usable(), reason="this torch has no oneDNN")


def linears(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if type(m) is nn.Linear]


def replaced(model: nn.Module, *states: Tensor) -> dict[nn.Module, nn.Module]:
    """What stands in the place of what, after a look at calls with each of `states`."""
    calls = Calls(model, linears(model))
    with torch.no_grad():
        calls.during(lambda: [model(each) for each in states])
        return _laid(linears(model), calls)


@given(
    sizes=some.lists(some.integers(1, 70), min_size=1, max_size=4),
    width=some.integers(1, 70),
    tokens=some.integers(1, 40),
    biases=some.integers(0, 15),
    times=some.integers(1, 3),
)
@settings(deadline=None, max_examples=60)
def test_joined_layers_give_what_each_gave(
    sizes: list[int], width: int, tokens: int, biases: int, times: int
) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(width, n, bias=bool(biases >> i & 1)) for i, n in enumerate(sizes)]
    ours = joined(layers)
    with torch.no_grad():
        for _ in range(times):  # states of one call are not those of another
            states = torch.randn(2, tokens, width)
            for layer, new in zip(layers, ours, strict=True):
                assert torch.allclose(new(states), layer(states), atol=1e-5)


def test_a_joined_layer_that_is_asked_alone_or_twice_is_right_too() -> None:
    layers = [nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 2)]
    ours = joined(layers)
    one, two = torch.randn(1, 5, 8), torch.randn(1, 5, 8)
    with torch.no_grad():
        for which, states in ((1, one), (1, one), (2, two), (0, one), (0, one), (2, two), (1, one)):
            assert torch.allclose(ours[which](states), layers[which](states), atol=1e-5)


class Block(nn.Module):
    """Three layers on the same states, a layer with its activation, one behind."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(8, 8) for _ in range(3))
        self.wide, self.act, self.back = nn.Linear(8, 16), activation, nn.Linear(16, 8)

    def forward(self, states: Tensor) -> Tensor:
        mixed = self.one(states) * self.two(states) + self.three(states)
        out: Tensor = self.back(self.act(self.wide(mixed)))
        return out


@pytest.mark.parametrize(
    ("activation", "known"),
    [(nn.GELU(), True), (nn.GELU("tanh"), True), (nn.SiLU(), True), (nn.ReLU(), True),
     (nn.ReLU6(), False), (nn.Mish(), False), (nn.Tanh(), False), (nn.Softmax(-1), False),
     (nn.Hardtanh(-100, 100), False), (nn.Identity(), False), (nn.Dropout(0.5), False)],
)  # fmt: skip
def test_an_activation_is_known_by_its_values(activation: nn.Module, known: bool) -> None:
    torch.manual_seed(0)
    model = Block(activation).eval()
    states = torch.randn(2, 5, 8) * 10
    with torch.no_grad():
        before = model(states)
        laid = replaced(model, states)
        assert (activation in laid) is known
        assert all(isinstance(laid[m], JointLinear) for m in (model.one, model.two, model.three))
        assert isinstance(laid[model.back], PackedLinear)
        _put(model, laid)
        assert not linears(model)
        assert torch.allclose(model(states), before, atol=1e-4)


class Experts(nn.Module):
    """Two experts with one activation, of which large states call the second."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.act = nn.Linear(8, 8), nn.Linear(8, 8), nn.GELU()

    def forward(self, states: Tensor) -> Tensor:
        expert = self.one if states.abs().max() < 50 else self.two
        found: Tensor = self.act(expert(states))
        return found


def test_an_activation_of_several_layers_stays() -> None:
    model = Experts()
    small, large = torch.randn(1, 4, 8), torch.full((1, 4, 8), 60.0)
    assert model.act not in replaced(model, small, large)


class Sharing(nn.Module):
    """Two blocks around one activation."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.GELU()
        self.one, self.two = Block(shared), Block(shared)

    def forward(self, states: Tensor) -> Tensor:
        return self.one(states) if states.abs().max() < 50 else self.two(states)  # type: ignore[no-any-return]


def test_an_activation_that_stands_in_two_places_stays() -> None:
    model = Sharing()
    assert model.one.act not in replaced(model, torch.randn(1, 4, 8))


class Changing(nn.Module):
    """Layers on one tensor that changes between them, or only sometimes on the same."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, states: Tensor) -> Tensor:
        other = states if len(states) == 1 else states + 1
        found: Tensor = self.one(states) + self.two(other)
        return found


def test_layers_that_are_not_always_called_on_the_same_states_stay_apart() -> None:
    model = Changing()
    laid = replaced(model, torch.randn(1, 4, 8), torch.randn(2, 4, 8))
    assert all(isinstance(laid[m], PackedLinear) for m in (model.one, model.two))


def test_a_classifier_joins_what_its_attention_asks_and_says_so() -> None:
    executor = Executor(converted("bert"), backend="eager")
    layers = executor.prepared.model.config.num_hidden_layers
    said = executor.report()["passes"]["linears"]
    assert f"{3 * layers} of them joined, {layers} with their activation" in said


@pytest.mark.parametrize("plain", [True, False])
def test_single_tokens_may_meet_plain_weights(plain: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr("headswap.spyre.linears._faster", lambda one, other: plain)
    model = causal("llama")
    executor = Executor(model, backend="eager")
    laid = [m for m in executor.prepared.model.modules() if isinstance(m, LaidLinear)]
    assert laid
    assert all((m.plain is not None) is plain for m in laid)
    prompts = [row.tolist() for row in probe_rows(model.config, (7, 2, 5))]
    found = executor.generate(prompts, 6)
    assert found == greedy(model, prompts, 6)
    assert [executor.generate([p], 6)[0] for p in prompts] == found


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_activated_layers_with_plain_weights_give_the_same(name: tuple[str, str]) -> None:
    layer = nn.Linear(16, 24)
    ours = PackedLinear(layer, name)
    states = torch.randn(1, 1, 16)
    with torch.no_grad():
        wanted = ACTIVATIONS[name](layer(states))
        assert torch.allclose(ours(states), wanted, atol=1e-5)
        ours.plain = layer.weight
        assert torch.allclose(ours(states), wanted, atol=1e-6)
