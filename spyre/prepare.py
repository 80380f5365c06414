# SPDX-License-Identifier: Apache-2.0
"""From a model to what an executor runs: a copy around the same weights, changed by named passes.

No class is patched and the model stays as it was: every pass works on a copy (`shared_copy`), and
dropping the copy undoes all of them.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from headswap.heads.interface import HeadedModel
from headswap.spyre.compiling import alone
from headswap.spyre.errors import DeviceError
from headswap.spyre.hook import BATCH, TOLD, Layer
from headswap.spyre.lengths import Lengths
from headswap.spyre.settled import Settled
from headswap.spyre.view import shared_copy
from headswap.spyre.visibility import Feature
from headswap.spyre.weights import Weights

POOLED = ("first", "last", "next", "mean", "eos", "pooler")
"""Pooling rules that read rows of the last states (a pooler: the first one)."""


@dataclass(frozen=True, slots=True)
class PassReport:
    """What one pass did to the copy."""

    name: str
    said: str


@dataclass(eq=False)
class Prepared:
    """A model's copy, and what was learned of it.

    model      the copy: backbone, head and all
    inputs     names that the backbone's forward takes
    layers     the calls of attention, in order; empty for a backbone that computes its own
    offset     what is added to a token's position for the backbone's `position_ids` (RoBERTa's
               begin behind the pad id)
    packable   texts may stand one behind the other in one row
    prunes     the last layer may run for the pooled rows alone
    shares     what texts of a pack begin with may run once
    padded     pads behind a text leave its states as they are
    weights    what the model's weights were
    settled    how the copy stood before it ran
    """

    model: Any
    inputs: frozenset[str]
    layers: list[tuple[nn.Module, Layer]] = field(default_factory=list)
    offset: int = 0
    packable: bool = False
    prunes: bool = False
    shares: bool = False
    padded: bool = True
    reports: list[PassReport] = field(default_factory=list)
    weights: Weights | None = None
    settled: Settled | None = None

    def settle(self) -> None:
        """Undo what an earlier run changed of the backbone itself."""
        if self.settled is not None:
            self.settled.restore()

    @property
    def backbone(self) -> nn.Module:
        """The copy's module that turns ids into states."""
        return backbone_of(self.model)

    @cached_property
    def lengths(self) -> Lengths:
        """How long texts may be; looked for once, since every call asks."""
        return Lengths.of(self.backbone)

    @property
    def dtype(self) -> torch.dtype:
        """The backbone's."""
        return next(p.dtype for p in self.backbone.parameters() if p.is_floating_point())

    @property
    def head_spec(self) -> Any:
        """How the head reads the states; None for a model without one."""
        return getattr(self.model, "head_spec", None)

    @property
    def pools(self) -> bool:
        """Whether the head reads rows of the last states, which can be picked before it runs."""
        return self.head_spec is None or self.head_spec.pooling in POOLED

    @property
    def hooked(self) -> bool:
        """Whether masks, positions and pooling are the host's: the backbone's attention comes to
        us, and packs of texts were seen to give its own numbers."""
        compat = self.head_spec is not None and self.head_spec.compat  # looks for pads itself
        return self.packable and self.pools and not compat

    @property
    def causal(self) -> bool:
        """Whether every layer was seen to look back only, by a rule that pages can follow, and has
        pages of its own: DiffLlama's modules call attention twice."""
        modules = {id(module) for module, _ in self.layers}
        return (
            self.packable
            and len(modules) == len(self.layers)
            and all(
                layer.visibility is not None and layer.visibility.causal for _, layer in self.layers
            )
        )

    @property
    def features(self) -> frozenset[Feature]:
        """What the layers want of an attention backend."""
        return frozenset().union(*(layer.features for _, layer in self.layers))

    @property
    def segments(self) -> bool:
        """Whether the backbone has segment embeddings, which are then always given."""
        return "token_type_ids" in self.inputs and bool(
            getattr(self.backbone.config, "type_vocab_size", 0)
        )

    @property
    def pad(self) -> int:
        """The id that stands on pads; any will do, but families that find their positions by it
        must see it."""
        found = getattr(self.backbone.config, "pad_token_id", None)
        return found if isinstance(found, int) and found >= 0 else 0

    def pooler(self, first: Tensor) -> Tensor:
        """The backbone's own pooler on rows `[batch, hidden]` of first tokens."""
        module: Any = self.backbone.pooler
        found: Tensor = module(first.unsqueeze(1))
        return found

    def positions(self, ids: Tensor) -> Tensor:
        """`position_ids` of one text's `ids` `[tokens]`, of the same shape.

        Where they begin behind the pad id, a pad id in the text is not counted
        (transformers, `create_position_ids_from_input_ids`).
        """
        if not self.offset:
            return torch.arange(len(ids))
        pad = self.offset - 1
        counted = ids != pad
        return counted.cumsum(0) * counted + pad

    def run(
        self, ids: Tensor, position_ids: Tensor, batch: Any, segments: Tensor | None = None
    ) -> Any:
        """The backbone's output for `ids` `[1 or batch, tokens]`, whose attention is told by
        `batch`."""
        more: dict[str, Any] = {BATCH: batch}
        if self.segments or segments is not None:
            more["token_type_ids"] = torch.zeros_like(ids) if segments is None else segments
        if "use_cache" in self.inputs:
            more["use_cache"] = False
        self.settle()
        return self.backbone(
            input_ids=ids, attention_mask=TOLD, position_ids=position_ids, return_dict=True, **more
        )


def refuse_around(model: Any) -> None:
    """Raise `DeviceError` for what changes a model's numbers around its backbone and head, which an
    executor runs by themselves."""
    found = [name for name in ("_forward_hooks", "_forward_pre_hooks") if getattr(model, name, {})]
    own = vars(model) if isinstance(model, nn.Module) else {}
    if "forward" in own and "_original_forward" not in own:  # accelerate's changes no number
        found.append("a forward of its own")
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        found.append("a prompt of virtual tokens")
    if found:
        raise DeviceError(
            f"{type(model).__name__} has {', '.join(found)}, which an executor would not run: it "
            "calls backbone and head itself. Remove that, or put it on the backbone."
        )


def backbone_of(model: Any) -> nn.Module:
    """The module of `model` that turns ids into states."""
    found: nn.Module = model.backbone if isinstance(model, HeadedModel) else model.base_model
    return found


@alone(compiled=True)
def prepare(model: Any, longest: int = 0) -> Prepared:
    """`model` (one of ours, or a causal language model) ready for an executor, whose plan has
    shapes up to `longest` tokens.

    Raises `DeviceError` for anything else.
    """
    from headswap.spyre.learning import learn, learn_pads
    from headswap.spyre.longer import look_further

    refuse_around(model)
    if not isinstance(model, HeadedModel) and not hasattr(model, "base_model"):
        raise DeviceError(
            f"An executor runs models of headswap and causal language models, and got a "
            f"{type(model).__name__}. Make one with headswap.load() or as_seq_cls_model()."
        )
    if hasattr(model, "get_base_model"):  # peft's wrapper, whose adapters lie in the layers
        model = model.get_base_model()
    copy = shared_copy(model).eval()
    names = frozenset(inspect.signature(backbone_of(copy).forward).parameters)
    made = Prepared(copy, names)
    made.reports.append(PassReport("copy", "modules and configs of its own, the same tensors"))
    made.settled = Settled(copy)
    plain = shared_copy(model).eval()
    settled = Settled(plain)
    learn(made, plain)
    look_further(made, plain, settled, longest)
    settled.restore()
    learn_pads(made, plain)
    if made.settled.look():
        said = "the backbone changes itself in a run, and is put back before each"
        made.reports.append(PassReport("settled", said))
    made.settle()
    made.weights = Weights(model)
    return made


def cast(made: Prepared, dtype: torch.dtype | None, why: str = "") -> None:
    """Put the backbone in `dtype` (None: as it is); a head stays in fp32. After padding, which is
    compared in the model's own precision. `why` is said behind it."""
    if dtype is None:
        made.reports.append(PassReport("dtype", f"backbone in {made.dtype}, as it was"))
    else:
        _cast(made, dtype, why)


def _cast(made: Prepared, dtype: torch.dtype, why: str) -> None:
    """The backbone in `dtype`; a causal language model whole. RoPE's frequencies stay as they are,
    as `from_pretrained(dtype=)` leaves them: in bf16 they are off by 0.4 %, times the position."""
    kept = [
        (module, name, tensor)
        for module in made.model.modules()
        for name, tensor in module.named_buffers(recurse=False)
        if name.endswith("inv_freq")
    ]
    headed = made.head_spec is not None
    (made.backbone if headed else made.model).to(dtype)
    for module, name, tensor in kept:
        setattr(module, name, tensor)
    said = f"backbone in {dtype}, head in float32" if headed else f"model in {dtype}"
    made.reports.append(PassReport("dtype", said + why))
