# SPDX-License-Identifier: Apache-2.0
"""`RewardModel`: conversations in, one raw number each out."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor

from headswap.convert.checkpoint import Checkpoint
from headswap.convert.decide import own_task
from headswap.registry.errors import ConversionError, InputError
from headswap.text.answers import check_finite, label_names
from headswap.text.conversation import ChatEncoder, Message
from headswap.text.encode import Encoded
from headswap.text.given import as_list
from headswap.text.notices import notify
from headswap.text.roles import Role, roles_of_model
from headswap.text.runner import Progress, Runner
from headswap.text.source import Adjust, open_source
from headswap.text.tokenwise import mark_id, steps, token_function, token_logits


class RewardModel:
    """Rates conversations with a checkpoint or a model that has one label.

    `source` is what `headswap.load` takes (with `load_options`), or a loaded model, which needs
    `tokenizer`. Messages go through `chat_template` (default: the tokenizer's), with exactly one
    start mark; a special mark that a message spells out stays text, unlike in transformers' own
    `apply_chat_template`, so that nobody closes a turn from inside. The number is the head's own,
    in fp32, with no function and no calibration applied. Of two labels, as many process-reward
    models have, `label` names the one that means good; the number is then its logit less the
    other's, whose sigmoid is the softmax of the two. A model that classifies tokens has
    `token_rewards` alone. The end of a conversation is what is rated, so one beyond the limit
    (`.limit`) is refused;
    `truncation="left"` cuts its beginning instead, behind the start mark.
    """

    def __init__(
        self,
        source: str | PathLike[str] | Any,
        *,
        tokenizer: Any = None,
        label: str | None = None,
        chat_template: str | None = None,
        batch_size: int = 32,
        max_length: int | None = None,
        truncation: Literal[False, "left"] = False,
        **load_options: Any,
    ) -> None:
        if truncation not in (False, "left"):
            raise ConversionError(
                f"truncation={truncation!r}: the end of a conversation is what is rated, so it may "
                "be False (refuse) or 'left' (cut the beginning)."
            )
        role: Role | None = "reward" if label is None else None
        opened = open_source(source, tokenizer, load_options, role, _with_task(label))
        # A copy: encoding sets a tokenizer's state, which belongs to the caller and other threads.
        self.model, self._tokenizer = opened.model, copy.deepcopy(opened.tokenizer)
        self._cuts = truncation == "left"
        self.labels = label_names(self.model.config)
        self._column = _column(self.model, self.labels, label)
        if chat_template is not None:
            self._tokenizer.chat_template = chat_template
        if not getattr(self._tokenizer, "chat_template", None):
            raise ConversionError(
                "The tokenizer has no chat template, so the form in which the model was trained "
                "is unknown. Pass chat_template=, or a tokenizer that has one."
            )
        self._chat = ChatEncoder(self._tokenizer)
        self._runner = Runner(opened, batch_size=batch_size, max_length=max_length)
        self.batch_size, self.limit = self._runner.batch_size, self._runner.limit

    @property
    def chat_template(self) -> Any:
        """The chat template that messages go through."""
        return self._tokenizer.chat_template

    def reward(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        chat_template: str | None = None,
        progress: Progress | None = None,
    ) -> list[float]:
        """The raw number of each conversation, in the order given; of one conversation too.

        A conversation is a list of messages {"role": ..., "content": ...}. Raises `InputError` for
        another form, for one that the chat template refuses, and for one beyond the limit, and
        `ConversionError` for a model of tokens. `chat_template` is for this call alone.
        """
        if _rates_tokens(self.model):
            raise ConversionError(
                f"{type(self.model).__name__} has a number for each token and none for a "
                "conversation; use token_rewards."
            )
        rows = self.encode(conversations, chat_template=chat_template)
        found = self._number(self._runner.logits(rows, self.labels, progress))
        check_finite(found, "Conversation")
        numbers: list[float] = found.tolist()
        return numbers

    def token_rewards(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        chat_template: str | None = None,
        step_mark: str | int | None = None,
        progress: Progress | None = None,
    ) -> list[list[float]]:
        """The head's raw number at every token of each conversation, in the order given.

        With `step_mark`, a token or its id, at those tokens alone, as process-reward models rate
        each step of an answer. Numbers and tokens (`encode`) stand one to one. Raises as `reward`
        does, `InputError` for a conversation without the mark, and `UnsupportedHeadError` for a
        head that is not put on the last token, of which other tokens have no number.
        """
        mark = None if step_mark is None else mark_id(self._tokenizer, step_mark)
        rows = self.encode(conversations, chat_template=chat_template, step_mark=step_mark)
        places = [steps(row.ids, mark, number) for number, row in enumerate(rows)]
        function = (token_logits if _rates_tokens(self.model) else token_function)(self.model)
        found = self._runner.each(rows, function, progress)
        numbers = [self._number(values[places[i]]) for i, values in enumerate(found)]
        check_finite(torch.tensor([float(each.sum()) for each in numbers]), "Conversation")
        return [values.tolist() for values in numbers]

    def _number(self, logits: Tensor) -> Tensor:
        """`[...]` of `[..., labels]`: the only column, or the good one less the other."""
        if len(self.labels) == 1:
            return logits[..., 0]
        return logits[..., self._column] - logits[..., 1 - self._column]

    def encode(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        chat_template: str | None = None,
        step_mark: str | int | None = None,
    ) -> list[Encoded]:
        """The ids that each conversation is given to the model as; of the special marks that its
        messages spell out, `step_mark` alone is read as one."""
        given: list[Any] = as_list(conversations, "conversations")
        if given and all(isinstance(each, Mapping) for each in given):
            given = [given]
        read = None
        if step_mark is not None:
            read = self._tokenizer.convert_ids_to_tokens(mark_id(self._tokenizer, step_mark))
        rows = [self._row(number, each, chat_template, read) for number, each in enumerate(given)]
        cut = sum(row.truncated for row in rows)
        if cut:
            notify(
                f"The beginnings of {cut} of {len(rows)} conversations were cut, to "
                f"{self.limit.value} tokens (limit from {self.limit.source})."
            )
        return rows

    def _row(
        self, number: int, messages: Any, chat_template: str | None, read: str | None
    ) -> Encoded:
        ids = self._chat.ids(number, messages, chat_template, read)
        limit, full = self.limit.value, len(ids)
        if limit is not None and full > limit > 1 and self._cuts:
            before = ids[: len(self._chat.start)]
            ids = [*before, *ids[len(before) - limit :]]
        if not ids or (limit is not None and len(ids) > limit):
            raise InputError(
                f"Conversation {number} has {len(ids)} tokens, and the limit is {limit} (from "
                f"{self.limit.source}). Its end is what is rated, so it is not cut; shorten it.",
                rows=(number,),
            )
        return Encoded(ids, None, full)


def _with_task(label: str | None) -> Adjust:
    """Loads what classifies tokens as it is, and else a head of one label, or of those it has."""

    def adjust(checkpoint: Checkpoint, options: dict[str, Any]) -> dict[str, Any]:
        own = "token-classify" if own_task(checkpoint) == "token-classify" else None
        return {"task": own or ("reward" if label is None else "classify"), **options}

    return adjust


def _rates_tokens(model: Any) -> bool:
    found = roles_of_model(model)
    return found is not None and found.kind == "token-classify"


def _column(model: Any, labels: Sequence[str], label: str | None) -> int:
    """The column that means good: the only one, or of two the one that `label` names."""
    if label is None and len(labels) == 1:
        return 0
    found = roles_of_model(model)
    if found is not None and found.kind not in ("classify", "reward", "token-classify"):
        found.require("reward", type(model).__name__)
    if len(labels) != 2 or label not in labels:
        raise ConversionError(
            f"label={label!r}; the model has {len(labels)} labels ({', '.join(labels[:5])}). Of "
            "two, it names the one that means good; of one, and of more than two, none does.",
            labels=tuple(labels),
        )
    return labels.index(label)
