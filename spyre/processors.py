# SPDX-License-Identifier: Apache-2.0
"""What a generation config does to logits before the most likely id is taken."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headswap.spyre.errors import DeviceError

REFUSED = {
    "sequence_bias": None, "exponential_decay_length_penalty": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "guidance_scale": 1.0, "watermarking_config": None,
    "stop_strings": None, "encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0,
}  # fmt: skip
"""Fields that change greedy text and are not done here, with the value at which they do nothing."""


class Processors:
    """transformers' own processors of logits, as a generation config asks for them; sampling and
    beams are not greedy and are left out.

    Raises `DeviceError` at construction for a field that is not done here.
    """

    def __init__(self, config: Any, ends: frozenset[int]) -> None:
        self._config, self._ends = config, sorted(ends)
        set_here = [
            f"{name}={value!r}" for name, nothing in REFUSED.items()
            if (value := getattr(config, name, None)) not in (None, nothing)
        ]  # fmt: skip
        if set_here:
            raise DeviceError(
                f"The generation config sets {', '.join(set_here)}, which this greedy decoding "
                "does not do. Set it to None on model.generation_config for text without it."
            )

    def of(self, prompt: int) -> Any:
        """The processors for a text whose prompt has so many tokens; they are called with its ids
        `[1, tokens]` and fp32 logits `[1, vocabulary]`."""
        from transformers.generation import logits_process as ways

        config, found = self._config, ways.LogitsProcessorList()
        penalty = getattr(config, "repetition_penalty", None)
        if penalty is not None and penalty != 1.0:
            found.append(ways.RepetitionPenaltyLogitsProcessor(penalty))
        if getattr(config, "no_repeat_ngram_size", None):
            found.append(ways.NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
        if getattr(config, "bad_words_ids", None):
            found.append(ways.NoBadWordsLogitsProcessor(config.bad_words_ids, self._ends or None))
        if self._ends and getattr(config, "min_length", None):
            found.append(ways.MinLengthLogitsProcessor(config.min_length, self._ends))
        if self._ends and getattr(config, "min_new_tokens", None):
            new = config.min_new_tokens
            found.append(ways.MinNewTokensLengthLogitsProcessor(prompt, new, self._ends))
        if getattr(config, "suppress_tokens", None):
            found.append(ways.SuppressTokensLogitsProcessor(config.suppress_tokens))
        if getattr(config, "begin_suppress_tokens", None):
            at_first = config.begin_suppress_tokens
            found.append(ways.SuppressTokensAtBeginLogitsProcessor(at_first, prompt))
        return found


def most_likely(logits: Tensor, ids: list[int], processors: Any) -> int:
    """The greedy id behind `ids`, by `logits` `[vocabulary]`."""
    if processors:  # fp32, as transformers gives them
        logits = processors(torch.tensor([ids]), logits.float()[None])[0]
    return int(logits.argmax())
