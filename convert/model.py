# SPDX-License-Identifier: Apache-2.0
"""The model that conversion returns: a real `PreTrainedModel` with its own forward.

A concrete class (made in `classes.py`) mixes one of these into a transformers class, so that
construction, tensor names and loading are transformers' own and only the way from hidden states
to logits is ours.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from headswap.convert.conversion import Conversion, mark, marks
from headswap.convert.inputs import accepted, made, moved, moved_back, switches
from headswap.convert.tokens import Tokens, difference, real_tokens
from headswap.heads import (
    HeadSpec,
    end_marks,
    moved_left,
    pool,
    pooled_index,
    run_head,
    take,
)
from headswap.registry.errors import InputError, MissingHeadError, UnsupportedHeadError


@dataclass(frozen=True, slots=True)
class Rows:
    """What the head gets: `values` `[batch, hidden]` (or `[batch, length, hidden]` where it runs on
    every token), which positions were `real` `[batch, length]`, and the backbone's `output`."""

    values: Tensor
    real: Tensor
    output: Any


class ConvertedModel(PreTrainedModel):
    """A backbone, a head specification, and the pooling rule between them."""

    # Trainer hands num_items_in_batch to a forward with **kwargs; ours are the backbone's inputs.
    accepts_loss_kwargs = False
    _said_difference = False
    conversion: ClassVar[Conversion]
    source_class: ClassVar[type[PreTrainedModel]]
    backbone_name: ClassVar[str]
    """Name of the attribute that holds the backbone."""
    head_spec: HeadSpec

    @classmethod
    def is_custom_code(cls) -> bool:
        """Whether transformers must not apply its own weight conversions (as for the source)."""
        asked = getattr(cls.source_class, "is_custom_code", None)
        return bool(asked()) if asked else False

    # transformers reads the source text of a class's module to see what can be set; ours says
    # nothing about the layers inside.
    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return bool(cls.source_class._can_set_attn_implementation())

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return bool(cls.source_class._can_set_experts_implementation())

    @property
    def backbone(self) -> nn.Module:
        """The module that turns ids into hidden states `[batch, length, hidden]`."""
        # Not getattr: some families call their backbone "backbone", as this property is called.
        module = self._modules[self.backbone_name]
        if module is None:
            raise AttributeError(self.backbone_name)
        return module

    @property
    def untrained_head(self) -> bool:
        """Whether the head holds random numbers that no training has touched yet (the mark in the
        config names the tensors)."""
        return bool(marks(self.config).get("untrained_head"))

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, path: Any, *args: Any, allow_untrained_head: bool = False, **kwargs: Any
    ) -> Any:
        """transformers' `from_pretrained`, strict: every tensor is accounted for.

        Raises `MissingHeadError` for a checkpoint without this class's head, unless
        `allow_untrained_head` is true, and `WeightError` for any other missing, unexpected or
        misshapen tensor. `output_loading_info=True` works as in transformers.
        """
        from headswap.convert.loading import load_class

        return load_class(cls, path, *args, allow_untrained_head=allow_untrained_head, **kwargs)

    def logits_of(self, rows: Tensor) -> Tensor:
        """Logits `[..., num_labels]` (fp32) of pooled rows `[..., hidden]` of any float dtype."""
        return run_head(self, self.head_spec, rows)

    def rows(self, inputs: Mapping[str, Tensor | None], **outputs: bool | None) -> Rows:
        """What the head is put on: pooled rows of the backbone's states for `inputs`.

        Raises `InputError` for a mask that no pooling rule can honour, for an input that the
        backbone does not take, and where the pooled token cannot be told (several rows, no mask, no
        pad id; no end mark).
        """
        ids, embeds, mask = (inputs.get(n) for n in ("input_ids", "inputs_embeds",
                                                     "attention_mask"))  # fmt: skip
        if (ids is None) == (embeds is None):
            raise InputError("Pass either input_ids or inputs_embeds, and not both.", rows=())
        real = real_tokens(self.head_spec, self.config, ids, mask, embeds)
        given = accepted(self.backbone, inputs)
        # Left pads would shift learned positions and enter recurrent states; behind the text they
        # do neither, and every reference class is right there.
        order = None if self.head_spec.compat or mask is None else moved_left(real)
        if order is not None:
            given, real = moved(given, order), take(real, order)
            ids = None if ids is None else take(ids, order)
        given.update(made(self, given))
        index = pooled_index(self.head_spec.pooling, real, ids, end_marks(self.config))
        self._say_difference(Tokens(ids, mask, real), index)
        found = self.backbone(**given, **switches(self, outputs), return_dict=True)
        rows = self._pooled(found, real, index)
        if order is not None:
            back = order.argsort(dim=1)
            found = moved_back(found, back)
            rows = take(rows, back) if self.head_spec.pooling == "all" else rows
        return Rows(rows, real, found)

    def _pooled(self, found: Any, real: Tensor, index: Tensor | None) -> Tensor:
        pooling = self.head_spec.pooling
        if pooling in ("pooler", "logits"):
            own: Tensor = found.pooler_output if pooling == "pooler" else found.logits
            return own
        if found[0].shape[1] != real.shape[1] and pooling != "first":
            raise UnsupportedHeadError(
                f"pooling={pooling!r} needs a state for every token, and "
                f"{type(self.backbone).__name__} gives {found[0].shape[1]} for {real.shape[1]}.",
                pooling=pooling,
            )
        return pool(found[0], real.to(found[0].device), pooling, index)

    def _say_difference(self, tokens: Tokens, index: Tensor | None) -> None:
        """Warn, once a model, where the reference class would pool another token of the text."""
        if self._said_difference or index is None or torch.compiler.is_compiling():
            return
        said = difference(self.head_spec, self.config, tokens, index)
        if said:
            self._said_difference = True
            warnings.warn(said, stacklevel=4)

    def _trained(self) -> None:
        """Forget the mark of an untrained head: a training step is under way."""
        if self.training and self.untrained_head:
            mark(self.config, untrained_head=None)


def _states(output: Any, name: str) -> Any:
    """The backbone's own `name`; of an encoder-decoder, the decoder's."""
    return getattr(output, name, None) or getattr(output, f"decoder_{name}", None)


class ClassifyingModel(ConvertedModel):
    """What classifiers of sequences and of tokens share: the forward."""

    output_class: ClassVar[type]

    def loss_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of `logits` against `labels`, a scalar."""
        raise NotImplementedError

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **inputs: Tensor | None,
    ) -> Any:
        """Classify a batch.

        `input_ids`, `attention_mask`, `token_type_ids`, `position_ids`: int64
        `[batch, length]`; `inputs_embeds`: `[batch, length, hidden]` in place of the ids;
        `inputs`: what else the backbone takes (`bbox`, `decoder_input_ids`, ...).
        Returns transformers' output for the task, with `.logits` in fp32, and `.loss` when `labels`
        are given. Padding may stand on either side; the mask decides.
        """
        rows = self.rows(
            {
                "input_ids": input_ids,
                "attention_mask": attention_mask,
                "token_type_ids": token_type_ids,
                "position_ids": position_ids,
                "inputs_embeds": inputs_embeds,
                **inputs,
            },
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        logits = self.logits_of(rows.values)
        if self.head_spec.pooling == "late":
            logits = pool(logits, rows.real.to(logits.device), "mean")
        loss = None
        if labels is not None:
            loss = self.loss_of(logits, labels)
            self._trained()
        output = self.output_class(
            loss=loss,
            logits=logits,
            hidden_states=_states(rows.output, "hidden_states"),
            attentions=_states(rows.output, "attentions"),
        )
        return output if return_dict in (None, True) else output.to_tuple()


class SequenceClassificationModel(ClassifyingModel):
    """Logits `[batch, num_labels]` from one pooled row a sequence."""

    output_class = SequenceClassifierOutput

    def loss_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """transformers' own loss by `problem_type`; `labels` `[batch]` or `[batch, num_labels]`."""
        from transformers.loss.loss_utils import ForSequenceClassificationLoss

        loss: Tensor = ForSequenceClassificationLoss(labels, logits, self.config)
        return loss


class TokenClassificationModel(ClassifyingModel):
    """Logits `[batch, length, num_labels]`, one row a token."""

    output_class = TokenClassifierOutput

    def loss_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy; `labels` `[batch, length]` int64, -100 where there is none."""
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class EmbeddingModel(ConvertedModel):
    """One vector `[batch, hidden]` a sequence, in `.pooler_output`, not normalised."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        return_dict: bool | None = None,
        **inputs: Tensor | None,
    ) -> Any:
        """Embed a batch; inputs as in `SequenceClassificationModel.forward`.

        Returns transformers' `BaseModelOutputWithPooling` with `.pooler_output`
        `[batch, hidden]` in fp32 and `.last_hidden_state` `[batch, length, hidden]`.
        """
        rows = self.rows(
            {
                "input_ids": input_ids,
                "attention_mask": attention_mask,
                "token_type_ids": token_type_ids,
                "position_ids": position_ids,
                "inputs_embeds": inputs_embeds,
                **inputs,
            }
        )
        output = BaseModelOutputWithPooling(
            last_hidden_state=rows.output[0], pooler_output=self.logits_of(rows.values)
        )
        return output if return_dict in (None, True) else output.to_tuple()


def require_head(missing: tuple[str, ...], path: Any, cls: type) -> None:
    """Raise `MissingHeadError` naming the tensors and the two ways out."""
    shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
    raise MissingHeadError(
        f"{path} has no classification head: {cls.__name__} needs {shown}. Either make the head "
        "from the language model's own output rows (label_tokens=[...]), or pass "
        "allow_untrained_head=True to train it yourself.",
        tensors=missing,
    )
