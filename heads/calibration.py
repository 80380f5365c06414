# SPDX-License-Identifier: Apache-2.0
"""Calibration of logits before the activation: the formula, its numbers, and who gave them."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from headswap.registry.errors import ConversionError

CalibrationSource = Literal["call", "headswap", "checkpoint", "default"]

# A quantity under each of its names. vLLM called the mean a bias and stored 1/sigma as a scale.
_NAMES = {
    "mean": "mean",
    "logit_mean": "mean",
    "logit_bias": "mean",
    "sigma": "sigma",
    "logit_sigma": "sigma",
    "scale": "scale",
    "logit_scale": "scale",
    "temperature": "temperature",
}
# At the top of a config only these: there, `logit_scale` is Cohere's, of its language model.
_TOP = ("logit_mean", "logit_sigma")
_SECTION = ("logit_mean", "logit_sigma", "logit_bias", "logit_scale", "temperature")
# Settings of text generation, with the values that say nothing.
_SAMPLING = {"do_sample": (None, False), "top_p": (None, 1.0), "top_k": (None, 50)}


@dataclass(frozen=True, slots=True)
class Calibration:
    """Logits z become `(z - mean) / sigma / temperature`, in fp32, before the activation.

    Raises `ConversionError` for a number that is not finite, and for a `sigma` or `temperature`
    that is not above 0.
    """

    mean: float = 0.0
    sigma: float = 1.0
    temperature: float = 1.0
    source: CalibrationSource = "call"
    reason: str = "asked for"

    def __post_init__(self) -> None:
        for name in ("mean", "sigma", "temperature"):
            value = _number(name, getattr(self, name))
            object.__setattr__(self, name, value)
            if name != "mean" and value <= 0:
                raise ConversionError(
                    f"Calibration: {name}={value} ({self.reason}); it divides the logits and must "
                    "be above 0.",
                    **{name: value},
                )

    def apply(self, logits: Tensor) -> Tensor:
        """The calibrated values of `logits` `[..., labels]`, fp32; `logits` stay as they are."""
        return (logits.float() - self.mean) / self.sigma / self.temperature


def choose_calibration(
    config: Any, call: Calibration | Mapping[str, float] | None = None
) -> Calibration:
    """The calibration of a classifier's logits.

    The call decides (a `Calibration`, or a mapping with `mean`, `sigma`, `temperature`; an empty
    one is none at all); then what headswap stored (`fit_head`); then the config: `logit_mean`,
    `logit_sigma` and `temperature`, there or in its `pooler_config`, which may also have vLLM's
    older names, `logit_bias` for the mean and `logit_scale` for 1/sigma. Else there is none.

    Raises `ConversionError` for an unknown name, two values of one quantity, a sigma of 0, and a
    temperature that stands among settings of text generation, where nothing tells whose it is.
    """
    if isinstance(call, Calibration):
        return call
    if call is not None and not isinstance(call, Mapping):
        raise ConversionError(
            f"calibration= is a {type(call).__name__}; it is a Calibration, or a mapping with "
            "mean, sigma, temperature."
        )
    if call is not None:
        return Calibration(**_quantities(call, "the call"), source="call", reason="asked for")
    mark = getattr(config, "headswap", None)
    stored = mark.get("temperature") if isinstance(mark, Mapping) else None
    if stored is not None:
        reason = "stored with the model by headswap"
        return Calibration(temperature=stored, source="headswap", reason=reason)
    return _saved(config) or Calibration(source="default", reason="the checkpoint says nothing")


def _saved(config: Any) -> Calibration | None:
    found = {name: getattr(config, name, None) for name in _TOP}
    fields = {name: getattr(config, name, None) for name in ("temperature", *_SAMPLING)}
    found["temperature"] = fields["temperature"] if _is_heads(config, fields) else None
    section = getattr(config, "pooler_config", None)
    if isinstance(section, Mapping):
        for name in _SECTION:
            _agree(name, found.get(name), section.get(name))
            found[name] = section.get(name) if found.get(name) is None else found[name]
        fields.update({name: section[name] for name in _SAMPLING if name in section})
    _check_sampling(found["temperature"], fields)
    given = {name: value for name, value in found.items() if value is not None}
    if not given:
        return None
    said = ", ".join(f"{name}={value}" for name, value in given.items())
    reason = f"the checkpoint says {said}"
    return Calibration(**_quantities(given, "the config"), source="checkpoint", reason=reason)


def _agree(name: str, one: Any, other: Any) -> None:
    if one is not None and other is not None and one != other:
        raise ConversionError(
            f"The config gives {name}={one}, and its pooler_config {name}={other}; pass "
            "calibration=.",
        )


def keep_temperature(config: Any, raw: Mapping[str, Any]) -> None:
    """Put the head's temperature of a config.json (`raw`) into the config's `pooler_config`.

    transformers 5 reads it as a setting of text generation, and drops those of a config.
    """
    if _is_heads(config, raw):
        kept = {n: raw[n] for n in ("temperature", *_SAMPLING) if raw.get(n) is not None}
        section = getattr(config, "pooler_config", None)
        config.pooler_config = {**kept, **(section if isinstance(section, Mapping) else {})}


def _is_heads(config: Any, fields: Mapping[str, Any]) -> bool:
    """Whether `fields` have a temperature that says something and is not the model's own."""
    own = "temperature" in inspect.signature(type(config).__init__).parameters
    names = getattr(config, "architectures", None) or ()
    writes = any("CausalLM" in str(name) or "LMHead" in str(name) for name in names)
    return fields.get("temperature") not in (None, 1.0) and not own and not writes


def _check_sampling(temperature: Any, fields: Mapping[str, Any]) -> None:
    said = [f"{n}={fields[n]}" for n, nothing in _SAMPLING.items() if fields[n] not in nothing]
    if temperature is not None and said:
        raise ConversionError(
            f"The config has temperature={temperature} and settings of text generation beside it "
            f"({', '.join(said)}), so it may be the head's or theirs. Pass calibration="
            f"{{'temperature': {temperature}}} or calibration={{}}.",
            temperature=temperature,
        )


def _quantities(given: Mapping[str, Any], where: str) -> dict[str, float]:
    """`mean`, `sigma` and `temperature` from numbers under any of their names."""
    found: dict[str, float] = {}
    for name, value in given.items():
        if name not in _NAMES:
            raise ConversionError(
                f"Unknown calibration {name!r} in {where}; known: {', '.join(_NAMES)}."
            )
        quantity, number = _NAMES[name], _number(name, value)
        if quantity == "scale":
            if number == 0:
                raise ConversionError(f"{name}=0 in {where}; it stands for 1/sigma.", scale=0.0)
            quantity, number = "sigma", 1 / number
        if quantity in found:
            raise ConversionError(f"{where} gives the calibration's {quantity} under two names.")
        found[quantity] = number
    return found


def _number(name: str, value: Any) -> float:
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not math.isfinite(value):
        raise ConversionError(f"Calibration: {name}={value!r} is no finite number.")
    return float(value)
