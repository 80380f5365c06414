# SPDX-License-Identifier: Apache-2.0
"""`RewardModel`: conversations in, one raw number each out."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal

from headswap.registry.errors import ConversionError, InputError
from headswap.text.answers import label_names
from headswap.text.encode import Encoded
from headswap.text.given import as_list, check_text
from headswap.text.notices import notify
from headswap.text.runner import Progress, Runner
from headswap.text.source import open_source
from headswap.text.template import start_mark
from headswap.text.tokenwise import mark_id, steps, token_function

Message = Mapping[str, Any]


class RewardModel:
    """Rates conversations with a checkpoint or a model that has one label.

    `source` is what `headswap.load` takes (with `load_options`), or a loaded model, which needs
    `tokenizer`. Messages go through the tokenizer's chat template, with exactly one start mark.
    The number is the head's own, in fp32, with no function and no calibration applied. The end of a
    conversation is what is rated, so one beyond the limit (`.limit`) is refused;
    `truncation="left"` cuts its beginning instead, behind the start mark.
    """

    def __init__(
        self,
        source: str | PathLike[str] | Any,
        *,
        tokenizer: Any = None,
        batch_size: int = 32,
        max_length: int | None = None,
        truncation: Literal[False, "left"] = False,
        **load_options: Any,
    ) -> None:
        if isinstance(source, (str, PathLike)):
            load_options = {"task": "reward", **load_options}
        if truncation not in (False, "left"):
            raise ConversionError(
                f"truncation={truncation!r}: the end of a conversation is what is rated, so it may "
                "be False (refuse) or 'left' (cut the beginning)."
            )
        opened = open_source(source, tokenizer, load_options, "reward")
        # A copy: encoding sets a tokenizer's state, which belongs to the caller and other threads.
        self.model, self._tokenizer = opened.model, copy.deepcopy(opened.tokenizer)
        self._cuts = truncation == "left"
        self.labels = label_names(self.model.config)
        if not getattr(self._tokenizer, "chat_template", None):
            raise ConversionError(
                "The tokenizer has no chat template, so the form in which the model was trained "
                "is unknown. Set tokenizer.chat_template, or pass a tokenizer that has one."
            )
        self._start = start_mark(self._tokenizer)
        self._runner = Runner(opened, batch_size=batch_size, max_length=max_length)
        self.batch_size, self.limit = self._runner.batch_size, self._runner.limit

    def reward(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        progress: Progress | None = None,
    ) -> list[float]:
        """The raw number of each conversation, in the order given; of one conversation too.

        A conversation is a list of messages {"role": ..., "content": ...}. Raises `InputError` for
        another form, for one that the chat template refuses, and for one beyond the limit.
        """
        rows = self.encode(conversations)
        found: list[float] = self._runner.logits(rows, self.labels, progress)[:, 0].tolist()
        return found

    def token_rewards(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        step_mark: str | int | None = None,
        progress: Progress | None = None,
    ) -> list[list[float]]:
        """The head's raw number at every token of each conversation, in the order given.

        With `step_mark`, a token or its id, at those tokens alone, as process-reward models rate
        each step of an answer. Numbers and tokens (`encode`) stand one to one. Raises as `reward`
        does, `InputError` for a conversation without the mark, and `UnsupportedHeadError` for a
        head that is not put on the last token, of which other tokens have no number.
        """
        rows = self.encode(conversations)
        mark = None if step_mark is None else mark_id(self._tokenizer, step_mark)
        places = [steps(row.ids, mark, number) for number, row in enumerate(rows)]
        found = self._runner.each(rows, token_function(self.model), progress)
        return [values[places[i]].tolist() for i, values in enumerate(found)]

    def encode(
        self, conversations: Sequence[Message] | Sequence[Sequence[Message]]
    ) -> list[Encoded]:
        """The ids that each conversation is given to the model as."""
        given: list[Any] = as_list(conversations, "conversations")
        if given and all(isinstance(each, Mapping) for each in given):
            given = [given]
        rows = [self._row(number, each) for number, each in enumerate(given)]
        cut = sum(row.truncated for row in rows)
        if cut:
            notify(
                f"The beginnings of {cut} of {len(rows)} conversations were cut, to "
                f"{self.limit.value} tokens (limit from {self.limit.source})."
            )
        return rows

    def _row(self, number: int, messages: Any) -> Encoded:
        _check(number, messages)
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False
            )
        except Exception as error:  # the template is the checkpoint's own program
            raise InputError(
                f"Conversation {number}: the chat template refuses it: {error}", rows=(number,)
            ) from error
        check_text(text, number, "Conversation")
        ids = list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        if self._start is not None:
            while ids[:1] == [self._start]:
                ids = ids[1:]
            ids = [self._start, *ids]
        limit, full = self.limit.value, len(ids)
        if limit is not None and full > limit > 1 and self._cuts:
            before = ids[:1] if self._start is not None else []
            ids = [*before, *ids[len(before) - limit :]]
        if not ids or (limit is not None and len(ids) > limit):
            raise InputError(
                f"Conversation {number} has {len(ids)} tokens, and the limit is {limit} (from "
                f"{self.limit.source}). Its end is what is rated, so it is not cut; shorten it.",
                rows=(number,),
            )
        return Encoded(ids, None, full)


def _check(number: int, messages: Any) -> None:
    good = (
        isinstance(messages, Sequence)
        and not isinstance(messages, str)
        and len(messages) > 0
        and all(isinstance(m, Mapping) and {"role", "content"} <= set(m) for m in messages)
    )
    if not good:
        raise InputError(
            f"Conversation {number} is not a list of messages with a role and a content.",
            rows=(number,),
        )
