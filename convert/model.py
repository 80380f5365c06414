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
from headswap.heads import HeadSpec, check_mask, mask_positions, pool, run_head
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
        module: nn.Module = getattr(self, self.base_model_prefix)
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
        inputs = {
            "input_ids": input_ids,
            "inputs_embeds": inputs_embeds,
            "attention_mask": attention_mask,
            **self._positions(position_ids, attention_mask),
            **self._token_types(token_type_ids),
            **outputs,
        }
        found = self.backbone(**self._accepted(inputs), return_dict=True)
        hidden = found[0]
        return pool(hidden, real.to(hidden.device), self.head_spec.pooling), found

    def _accepted(self, inputs: dict[str, Any]) -> dict[str, Any]:
        known = inspect.signature(self.backbone.forward).parameters
        any_name = any(p.kind is p.VAR_KEYWORD for p in known.values())
        given = {name: value for name, value in inputs.items() if value is not None}
        if "use_cache" in known or any_name:
            given["use_cache"] = False
        return given

    def _positions(self, given: Tensor | None, mask: Tensor | None) -> dict[str, Tensor]:
        """The caller's positions, else positions that start at the first real token."""
        takes = "position_ids" in inspect.signature(self.backbone.forward).parameters
        if given is not None:
            if not takes:
                raise InputError(
                    f"position_ids were given, but {type(self.backbone).__name__} takes none; "
                    "leave them out.",
                    rows=(),
                )
            return {"position_ids": given}
        if mask is None or not takes:
            return {}
        offset = position_offset(self.backbone)
        real = mask != 0
        return {"position_ids": mask_positions(mask) + offset * real + max(offset - 1, 0) * ~real}

    def _token_types(self, given: Tensor | None) -> dict[str, Tensor]:
        if given is None:
            return {}
        if "token_type_ids" in inspect.signature(self.backbone.forward).parameters:
            return {"token_type_ids": given}
        if bool((given != 0).any()):
            raise InputError(
                f"token_type_ids were given, but {type(self.backbone).__name__} has no segments; "
                "leave them out.",
                rows=(),
            )
        return {}

    def _real_tokens(
        self, ids: Tensor | None, mask: Tensor | None, embeds: Tensor | None
    ) -> Tensor:
        """Which positions `[batch, length]` are real, by the rule that decides (`HeadSpec`)."""
        given = [tensor for tensor in (ids, embeds) if tensor is not None]
        shape, device = given[0].shape[:2], given[0].device
        if mask is not None and not torch.compiler.is_compiling():
            check_mask(mask)
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
