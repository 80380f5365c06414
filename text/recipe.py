# SPDX-License-Identifier: Apache-2.0
"""How a checkpoint's vectors are made, as sentence-transformers' files beside it say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headswap.convert.checkpoint import Checkpoint
from headswap.convert.embedding import StoredPooling, read_pooling
from headswap.convert.modules import Module, read_modules, settings, transformer_settings
from headswap.convert.weights import read_tensors
from headswap.registry.errors import UnsupportedHeadError, WeightError

_KEY = "sentence_embedding"
_UNSUPPORTED = ("query_expansion", "query_length", "document_length", "processing_kwargs")


@dataclass(frozen=True)
class Recipe:
    """What stands between hidden states and vectors. `pooling` None: the model's own pooling."""

    pooling: StoredPooling | None = None
    steps: tuple[nn.Module, ...] = ()
    normalize: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    lower: bool = False
    dimension: int | None = None


class Unit(nn.Module):
    """Vectors `[batch, width]` of length 1."""

    def forward(self, vectors: Tensor) -> Tensor:
        """`vectors` divided by their Euclidean length (at least 1e-12, as in torch)."""
        return nn.functional.normalize(vectors, dim=-1)


class Projection(nn.Module):
    """sentence-transformers' Dense: `activation(x W^T + b)`, plus the input where it says so."""

    def __init__(self, linear: nn.Linear, activation: nn.Module, residual: nn.Module | None):
        super().__init__()
        self.linear, self.activation, self.residual = linear, activation, residual

    def forward(self, vectors: Tensor) -> Tensor:
        """`[batch, out]` of `[batch, in]`, fp32."""
        out: Tensor = self.activation(self.linear(vectors))
        return out if self.residual is None else out + self.residual(vectors)


def read_recipe(checkpoint: Checkpoint) -> Recipe:
    """The recipe of `checkpoint`; an empty one without modules.json.

    Raises `UnsupportedHeadError`, by name, for a module or a setting that headswap does not run,
    and `WeightError` for a Dense whose tensors are not those that its config asks for.
    """
    modules = read_modules(checkpoint.folder)
    if not modules:
        return Recipe()
    kinds = [module.kind for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise UnsupportedHeadError(
            f"{checkpoint.name}: modules.json lists {', '.join(kinds)}; an embedder here starts "
            "with Transformer, Pooling.",
            modules=tuple(kinds),
        )
    steps = [_step(module) for module in modules[2:]]
    normalize = bool(steps) and isinstance(steps[-1], Unit)
    first, said = modules[0], settings(checkpoint.folder)
    transformer = _transformer(first.folder)
    prompts = said.get("prompts") or {}
    return Recipe(
        pooling=read_pooling(modules[1].config, str(modules[1].folder / "config.json")),
        steps=tuple(steps[:-1] if normalize else steps),
        normalize=normalize,
        prompts={str(name): str(text or "") for name, text in prompts.items()},
        default_prompt=said.get("default_prompt_name"),
        lower=bool(transformer.get("do_lower_case")),
        dimension=said.get("truncate_dim"),
    )


def _transformer(folder: Path) -> dict[str, Any]:
    """The Transformer module's settings; those that change what is run are refused by name."""
    found = transformer_settings(folder)
    wrong = [name for name in _UNSUPPORTED if found.get(name)]
    if found.get("transformer_task", "feature-extraction") != "feature-extraction":
        wrong.append("transformer_task")
    if "message" in (found.get("modality_config") or {}):
        raise UnsupportedHeadError(
            f"{folder} was saved to put each text through the tokenizer's chat template, which "
            "headswap does not. If the model was trained on plain texts, remove 'message' from "
            "modality_config in sentence_bert_config.json.",
            settings=("modality_config",),
        )
    text = (found.get("modality_config") or {}).get("text", {})
    if text.get("method_output_name", "last_hidden_state") != "last_hidden_state":
        wrong.append("modality_config")
    if wrong:
        raise UnsupportedHeadError(
            f"{folder}: the Transformer module sets {', '.join(wrong)} "
            f"({ {name: found[name] for name in wrong} }), which headswap does not do.",
            settings=tuple(wrong),
        )
    return found


def _step(module: Module) -> nn.Module:
    keys = [module.config.get(f"module_{name}_name") or _KEY for name in ("input", "output")]
    if module.kind not in ("Dense", "Normalize") or keys != [_KEY, _KEY]:
        raise UnsupportedHeadError(
            f"modules.json lists {module.kind} ({module.folder.name}) on {' -> '.join(keys)}; "
            "behind the pooling headswap runs Dense and Normalize, on the sentence's vector.",
            module=module.kind,
        )
    return Unit() if module.kind == "Normalize" else _dense(module)


def _dense(module: Module) -> Projection:
    config = module.config
    known = {"in_features", "out_features", "bias", "activation_function", "module_input_name",
             "module_output_name", "use_residual"}  # fmt: skip
    unknown = sorted(set(config) - known)
    if unknown:
        raise UnsupportedHeadError(
            f"{module.folder}: Dense has the settings {', '.join(unknown)}, which headswap does "
            "not know.",
            settings=tuple(unknown),
        )
    width, out = int(config["in_features"]), int(config["out_features"])
    linear = nn.Linear(width, out, bias=bool(config.get("bias", True)))
    residual: nn.Module | None = None
    if config.get("use_residual"):
        residual = nn.Identity() if width == out else nn.Linear(width, out, bias=False)
    made = Projection(linear, _activation(config), residual)
    _fill(made, {k: v.float() for k, v in read_tensors(module.folder).items()}, module.folder)
    return made.eval()


def _activation(config: Mapping[str, Any]) -> nn.Module:
    """The activation by its class path in torch, which is looked up and never imported."""
    path = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    found = getattr(nn, path.rsplit(".", 1)[-1], None)
    if path.startswith("torch.nn.") and isinstance(found, type) and issubclass(found, nn.Module):
        try:
            made = found()
        except TypeError:
            made = None
        if made is not None and not list(made.parameters()):
            return made
    raise UnsupportedHeadError(
        f"Dense has the activation {path!r}; headswap has those of torch.nn that hold no numbers.",
        activation=path,
    )


@torch.no_grad()
def _fill(made: nn.Module, stored: Mapping[str, Tensor], folder: Path) -> None:
    wanted = {name: tuple(value.shape) for name, value in made.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in stored.items()}
    if wanted != found:
        raise WeightError(
            f"{folder}: Dense needs the tensors {wanted}; found {found}.",
            missing=tuple(sorted(set(wanted) - set(found))),
            unexpected=tuple(sorted(set(found) - set(wanted))),
        )
    made.load_state_dict(dict(stored))


def pooled(hidden: Tensor, counted: Tensor, modes: Sequence[str]) -> Tensor:
    """Vectors `[batch, modes * hidden]` (fp32) of `hidden` `[batch, length, hidden]`, the modes'
    vectors joined in order.

    `counted` `[batch, length]` (bool) marks the tokens that are pooled: real ones, which stand in
    front, perhaps without a prompt. Formulas as in sentence-transformers' Pooling.
    """
    states = hidden.float().masked_fill(~counted.unsqueeze(-1), 0.0)
    number = counted.sum(dim=1, keepdim=True)
    rows = torch.arange(len(states), device=states.device)
    places = torch.arange(1, states.shape[1] + 1, device=states.device)
    found = []
    for mode in modes:
        if mode == "cls":
            found.append(states[rows, counted.int().argmax(dim=1)])
        elif mode == "lasttoken":
            found.append(states[rows, (places * counted).argmax(dim=1)])
        elif mode == "max":
            low = hidden.float().masked_fill(~counted.unsqueeze(-1), -torch.inf)
            found.append(low.amax(dim=1))
        elif mode == "weightedmean":
            weights = (places * counted).unsqueeze(-1).float()
            found.append((states * weights).sum(dim=1) / weights.sum(dim=1))
        else:
            divisor = number if mode == "mean" else number.float().sqrt()
            found.append(states.sum(dim=1) / divisor)
    return torch.cat(found, dim=-1)
