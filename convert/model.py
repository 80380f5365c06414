# SPDX-License-Identifier: Apache-2.0
"""The model that conversion returns: a real `PreTrainedModel` with its own forward.

A concrete class (made in `classes.py`) mixes one of these into a transformers class, so that
construction, tensor names and loading are transformers' own and only the way from hidden states
to logits is ours.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import logging

from headswap.convert.conversion import Conversion, mark, marks, text_field
from headswap.heads import HeadSpec, check_mask, moved_left, pool, run_head, take
from headswap.registry.errors import InputError, MissingHeadError

logger = logging.get_logger(__name__)


class ConvertedModel(PreTrainedModel):
    """A backbone, a head specification, and the pooling rule between them."""

    conversion: ClassVar[Conversion]
    source_class: ClassVar[type[PreTrainedModel]]
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
        module = self._modules[self.base_model_prefix]
        if module is None:
            raise AttributeError(self.base_model_prefix)
        return module

    @property
    def untrained_head(self) -> bool:
        """Whether the head holds random numbers that no training step has touched yet."""
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

    def head(self, rows: Tensor) -> Tensor:
        """Logits `[..., num_labels]` (fp32) of pooled rows `[..., hidden]` of any float dtype."""
        return run_head(self, self.head_spec, rows)

    def rows(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **outputs: bool | None,
    ) -> tuple[Tensor, Any]:
        """Pooled rows `[batch, hidden]` and the backbone's output.

        Raises `InputError` for a mask that no pooling rule can honour, and where the pooled
        token cannot be told (several rows, no mask, no pad id).
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("Pass either input_ids or inputs_embeds, and not both.", rows=())
        real = self._real_tokens(input_ids, attention_mask, inputs_embeds)
        inputs = self._accepted(
            {
                "input_ids": input_ids,
                "inputs_embeds": inputs_embeds,
                "attention_mask": attention_mask,
                "position_ids": position_ids,
                "token_type_ids": token_type_ids,
            }
        )
        # Left pads would shift learned positions and enter recurrent states; behind the text they
        # do neither, and every reference class is right there.
        order = None if self.head_spec.compat or attention_mask is None else moved_left(real)
        if order is not None:
            inputs = {name: take(value, order) for name, value in inputs.items()}
            real = take(real, order)
        found = self.backbone(**inputs, **self._switches(outputs), return_dict=True)
        rows = pool(found[0], real.to(found[0].device), self.head_spec.pooling)
        if order is not None and self.head_spec.pooling == "all":
            rows = take(rows, order.argsort(dim=1))
        return rows, found

    def _accepted(self, inputs: dict[str, Tensor | None]) -> dict[str, Tensor]:
        """The given inputs; one that the backbone does not take is refused if it says anything."""
        known = inspect.signature(self.backbone.forward).parameters
        # forward(*args, **kwargs) hands everything on (decoder wrappers); **kwargs alone ignores.
        any_name = any(p.kind is p.VAR_POSITIONAL for p in known.values())
        given = {name: value for name, value in inputs.items() if value is not None}
        for name in [n for n in given if n not in known]:
            value = given[name]
            if name == "token_type_ids" and not bool((value != 0).any()):
                del given[name]  # one segment is no segment
            elif name == "attention_mask" and not any_name and bool((value != 0).all()):
                del given[name]  # nothing is masked
            elif name in ("token_type_ids", "position_ids") or not any_name:
                raise InputError(
                    f"{name} was given, but {type(self.backbone).__name__} takes none and its "
                    "numbers would not follow it; leave it out.",
                    rows=(),
                )
        return given

    def _switches(self, outputs: dict[str, bool | None]) -> dict[str, bool]:
        known = inspect.signature(self.backbone.forward).parameters
        any_name = any(p.kind is p.VAR_KEYWORD for p in known.values())
        given = {name: value for name, value in outputs.items() if value is not None}
        return {**given, "use_cache": False} if "use_cache" in known or any_name else given

    def _real_tokens(
        self, ids: Tensor | None, mask: Tensor | None, embeds: Tensor | None
    ) -> Tensor:
        """Which positions `[batch, length]` are real, by the rule that decides (`HeadSpec`)."""
        given = [tensor for tensor in (ids, embeds) if tensor is not None]
        shape, device = given[0].shape[:2], given[0].device
        if mask is not None and not torch.compiler.is_compiling():
            check_mask(mask, tuple(shape))
        by_pad_id = self.head_spec.pooling == "last" and ids is not None
        if mask is not None and not self.head_spec.compat:
            return mask != 0
        if not by_pad_id or ids is None:
            return torch.ones(shape, dtype=torch.bool, device=device)
        pad = text_field(self.config, "pad_token_id")
        if pad is None and shape[0] > 1:
            raise InputError(
                f"{shape[0]} rows were given without attention_mask and the config has no "
                "pad_token_id, so the last real token is unknown. Pass attention_mask, or set "
                "model.config.pad_token_id.",
                rows=(),
            )
        return torch.ones_like(ids, dtype=torch.bool) if pad is None else ids != pad

    def _trained(self) -> None:
        """Forget the mark of an untrained head: a training step is under way."""
        if self.training and self.untrained_head:
            mark(self.config, untrained_head=None)


def position_offset(backbone: nn.Module) -> int:
    """First position id of a real token: 0, or padding_idx + 1 for RoBERTa-like encoders.

    RoBERTa's position table keeps rows 0 .. padding_idx for pads
    (transformers, `RobertaEmbeddings.create_position_ids_from_input_ids`).
    """
    table = getattr(getattr(backbone, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    return 0 if padding is None else int(padding) + 1


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
    ) -> Any:
        """Classify a batch.

        `input_ids`, `attention_mask`, `token_type_ids`, `position_ids`: int64
        `[batch, length]`; `inputs_embeds`: `[batch, length, hidden]` in place of the ids.
        Returns transformers' output for the task, with `.logits` in fp32, and `.loss` when `labels`
        are given. Padding may stand on either side; the mask decides.
        """
        rows, found = self.rows(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        logits = self.head(rows)
        loss = None
        if labels is not None:
            loss = self.loss_of(logits, labels)
            self._trained()
        output = self.output_class(
            loss=loss,
            logits=logits,
            hidden_states=getattr(found, "hidden_states", None),
            attentions=getattr(found, "attentions", None),
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
    ) -> Any:
        """Embed a batch; inputs as in `SequenceClassificationModel.forward`.

        Returns transformers' `BaseModelOutputWithPooling` with `.pooler_output`
        `[batch, hidden]` in fp32 and `.last_hidden_state` `[batch, length, hidden]`.
        """
        rows, found = self.rows(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        )
        output = BaseModelOutputWithPooling(
            last_hidden_state=found[0], pooler_output=self.head(rows)
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
