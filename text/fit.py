# SPDX-License-Identifier: Apache-2.0
"""`fit_head`: labelled texts in, a converted model with a trained head out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headswap.convert.conversion import mark, marks
from headswap.convert.model import SequenceClassificationModel
from headswap.heads import Activation, Dropout, choose_activation, pool, run_head
from headswap.registry.errors import ConversionError, InputError, LabelError, UnsupportedHeadError
from headswap.text.classifier import Classifier
from headswap.text.columns import label_columns
from headswap.text.encode import Encoded
from headswap.text.given import Text, Truncation
from headswap.text.logistic import Linear, best_temperature, choose_penalty, fit_linear, split
from headswap.text.runner import Progress

PENALTIES = tuple(10 ** (-k / 2) for k in range(9))
"""Strengths of the L2 penalty that are tried: from 1 down to 0.0001, two a decade."""


@dataclass(frozen=True, slots=True)
class FittedHead:
    """A model whose head was fitted, and how good it is on texts that the fit did not see.

    `n` texts were given, of which `held_out` were kept from the fit; on those `accuracy` and
    `log_loss` (mean, natural logarithm) were measured, of the head as it is stored, in fp32.
    `temperature` is the one by which the logits must be divided for the lowest log-loss there,
    `calibrated_log_loss`; None where no temperature is best, as where every text is right.
    `penalty` is the chosen one; `bias` says whether the head has a bias (a stock score head has
    none, and was then fitted without).
    """

    model: Any = field(repr=False)
    labels: tuple[str, ...]
    n: int
    held_out: int
    accuracy: float
    log_loss: float
    temperature: float | None
    calibrated_log_loss: float | None
    penalty: float
    bias: bool


def fit_head(
    model: Any,
    tokenizer: Any,
    texts: Sequence[Text],
    labels: Sequence[str | int],
    *,
    held_out: float = 0.2,
    penalties: Sequence[float] = PENALTIES,
    fold_temperature: bool = False,
    store_temperature: bool = False,
    seed: int = 0,
    template: str | None = None,
    batch_size: int = 32,
    max_length: int | None = None,
    truncation: Truncation = True,
    progress: Progress | None = None,
) -> FittedHead:
    """Train the last linear layer of a converted classifier on labelled texts.

    `model` (from `load(..., allow_untrained_head=True)` or `as_seq_cls_model`) is changed in
    place: its output layer is filled, its config's labels are named, and it is no longer marked as
    untrained. All else stays as it is: each text goes through the model once, and what the model
    feeds its output layer is the input of a multinomial logistic regression with an L2 penalty
    (formula and sources in `headswap.text.logistic`). A head without a bias is fitted without
    one. Where other layers of the head are untrained too (a pooler that the checkpoint lacks,
    RoBERTa's dense layer), it is refused: convert with `head="score", pooling="mean"`.

    `labels` are names, or columns 0 .. n-1; every column must occur, at least four times. Names
    that the config does not have yet take the columns in sorted order. The share `held_out` of
    each label's texts is drawn by `seed` and kept from the fit; `penalties` are compared by
    cross-validation on the others. The temperature changes no weight unless `fold_temperature`
    is true: weight and bias are then divided by it. With `store_temperature` it is stored in the
    config's mark instead, `Classifier` divides the logits by it before the activation, and the raw
    logits stay as they are. `template` is stored with the model;
    `batch_size`, `max_length`, `truncation`, `progress` as in `headswap.text.Classifier`.

    Raises `LabelError`, `InputError` (states that are not finite; texts without tokens),
    `UnsupportedHeadError` and `ConversionError`; the model is then as it was.
    """
    _check_model(model)
    _check_options(held_out, penalties)
    if fold_temperature and store_temperature:
        raise ConversionError("Give fold_temperature or store_temperature, not both.")
    _say_untrained(model)
    given = list(texts)
    columns, names = label_columns(list(labels), len(given), model)
    classifier = Classifier(
        model, tokenizer=tokenizer, template=template or "auto", batch_size=batch_size,
        max_length=max_length, truncation=truncation,
    )  # fmt: skip
    rows = classifier.encode(given)
    states = _states(classifier, rows, progress)
    fitted, found = _measured(states, columns, held_out, seed, penalties, model, names)
    if fold_temperature:
        found = _folded(found, _best(fitted.temperature))
    # An earlier head's calibration, wherever it is saved, is not this one's: 1 says so.
    earlier = classifier.calibration.source != "default"
    kept = _best(fitted.temperature) if store_temperature else 1.0 if earlier else None
    _fill(model, found, names, classifier.template, kept)
    return fitted


def _measured(
    states: Tensor, columns: list[int], held_out: float, seed: int, penalties: Sequence[float],
    model: Any, names: tuple[str, ...],
) -> tuple[FittedHead, Linear]:  # fmt: skip
    """The fit on one part of `states` `[n, width]`, and its figures on the other."""
    chosen, held = split(columns, held_out, seed)
    every, count, bias = torch.tensor(columns), len(names), _output(model).bias is not None
    penalty = choose_penalty(states[chosen], every[chosen], count, penalties, bias)
    found = _stored(fit_linear(states[chosen], every[chosen], count, penalty, bias))
    logits, truth = found(states[held]), every[held]
    temperature = best_temperature(logits, truth)
    calibrated = None if temperature is None else _log_loss(logits / temperature, truth)
    right = (logits.argmax(dim=1) == truth).double().mean().item()
    fitted = FittedHead(model, names, len(columns), len(held), right, _log_loss(logits, truth),
                        temperature, calibrated, penalty, bias)  # fmt: skip
    return fitted, found


# -- what can be fitted ---------------------------------------------------------------------------


def _check_model(model: Any) -> None:
    """Refuse a model whose logits are not a linear layer of what comes before it, softmaxed."""
    if not isinstance(model, SequenceClassificationModel) or model.conversion.task != "classify":
        raise ConversionError(
            f"fit_head needs a classifier that headswap made; got a {type(model).__name__}. Make "
            "one with headswap.as_seq_cls_model(...), or with headswap.load(path, "
            "task='classify', allow_untrained_head=True).",
        )
    count = int(model.config.num_labels or 0)
    activation = choose_activation(model.config, num_labels=count)
    if count < 2 or activation.name != "softmax":
        raise LabelError(
            f"fit_head fits a softmax over two or more labels, but this model has {count} and "
            f" {activation.name} scores ({activation.reason}); "
            "convert with num_labels= of the labels' number and without problem_type.",
        )
    layer, after = _output(model), model.head_spec.layers[_place(model) + 1 :]
    more = [one for one in after if not isinstance(one, Dropout) and one != Activation("linear")]
    if more or model.head_spec.output.applied or type(layer) is not nn.Linear:
        what = type(more[0]).__name__ if more else type(layer).__name__
        raise UnsupportedHeadError(
            f"The last layer of the head ({model.head_spec.output.path}) is no plain linear that "
            f"gives the logits by itself (found: {what}); convert with head='score'.",
            head=model.head_spec.family,
        )
    _check_trained(model)


def _check_trained(model: Any) -> None:
    """Refuse a head in which other layers than the last are random too."""
    said = marks(model.config).get("untrained_head")
    names = model.head_spec.tensors()
    random = names if said is True else tuple(n for n in names if n in (said or ()))
    last = model.head_spec.output.path
    inner = tuple(name for name in random if name.rpartition(".")[0] != last)
    if inner:
        raise UnsupportedHeadError(
            f"The head {model.head_spec.family!r} has more layers that hold random numbers "
            f"({', '.join(inner)}), and fit_head trains the last one only. Convert with "
            "head='score', pooling='mean' (an encoder), or train the whole head with Trainer.",
            head=model.head_spec.family,
            tensors=inner,
        )


def _say_untrained(model: Any) -> None:
    """Warn of a stored layer that training has hardly ever touched: its bias would have moved."""
    for layer in model.head_spec.dense[:-1]:
        bias = model.get_submodule(layer.path).bias
        if bias is not None and not bias.any():
            warnings.warn(
                f"The bias of {layer.path} is zero throughout, as initialisation leaves it, so the "
                "checkpoint's layer is probably untrained, and the fit stands on it. An encoder "
                "converted with head='score', pooling='mean' goes without.",
                stacklevel=3,  # the line that called fit_head
            )


def _check_options(held_out: float, penalties: Sequence[float]) -> None:
    if not 0 < held_out < 1:
        raise ConversionError(f"held_out={held_out}; it is a share, more than 0 and less than 1.")
    if not penalties or not all(0 < p < math.inf for p in penalties):
        raise ConversionError(f"penalties={list(penalties)}; give one or more numbers above 0.")


def _place(model: Any) -> int:
    """Where the output layer stands among the head's layers."""
    layers = model.head_spec.layers
    return max(i for i, layer in enumerate(layers) if layer is model.head_spec.output)


def _output(model: Any) -> Any:
    return model.get_submodule(model.head_spec.output.path)


# -- states, and the way back ---------------------------------------------------------------------


def head_inputs(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """What the model feeds its output layer, `[batch, width]` fp32: the pooled rows, through all
    layers of the head but the last."""
    rows, spec = model.rows(batch), model.head_spec
    states = run_head(model, replace(spec, layers=spec.layers[: _place(model)]), rows.values)
    if spec.pooling == "late":  # a mean of logits is the logits of the mean
        states = pool(states, rows.real.to(states.device), "mean")
    return states


def _states(classifier: Classifier, rows: Sequence[Encoded], progress: Progress | None) -> Tensor:
    """fp64 states `[texts, width]` on the CPU, in the order of `rows`."""
    model = classifier.model
    found = classifier.runner.run(rows, partial(head_inputs, model), progress).double()
    broken = tuple(int(i) for i in (~found.isfinite().all(dim=1)).nonzero().flatten())
    if broken:
        raise InputError(
            f"The model's states of {len(broken)} texts are not finite (text {broken[0]} is the "
            "first); load it in fp32, or look for the text that does this.",
            rows=broken,
        )
    return found


def _stored(found: Linear) -> Linear:
    """`found` as fp32 will hold it, so that what is measured is what is stored."""
    bias = None if found.bias is None else found.bias.float().double()
    return Linear(found.weight.float().double(), bias)


def _best(temperature: float | None) -> float:
    if temperature is None:
        raise ConversionError(
            "No temperature is best on the held-out texts (all are right, or the logits are worse "
            "than none); hold more out, or leave fold_temperature and store_temperature out."
        )
    return temperature


def _folded(found: Linear, temperature: float) -> Linear:
    bias = None if found.bias is None else found.bias / temperature
    return Linear(found.weight / temperature, bias)


def _log_loss(logits: Tensor, columns: Tensor) -> float:
    return float(F.cross_entropy(logits, columns))


def _fill(model: Any, found: Linear, names: tuple[str, ...], template: Any,
          temperature: float | None) -> None:  # fmt: skip
    """Put the fit into the model; nothing here can fail half-way."""
    layer = _output(model).float()  # a head runs in fp32 whatever the backbone's dtype
    with torch.no_grad():
        layer.weight.copy_(found.weight)
        if found.bias is not None:
            layer.bias.copy_(found.bias)
    model.config.id2label = dict(enumerate(names))
    model.config.label2id = {name: i for i, name in enumerate(names)}
    mark(model.config, untrained_head=None, template=template, temperature=temperature)
