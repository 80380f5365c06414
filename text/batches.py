# SPDX-License-Identifier: Apache-2.0
"""Which rows a model may run together, so that no row's numbers follow from another's.

Most may be padded to one length. In some backbones pads reach a text (MobileBERT and ConvBERT mix
neighbouring tokens), which is found by running a few rows; and two kinds of RoPE turn all rows of a
run by the longest, or by the longest that ever ran.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from headswap.spyre.learning import pads_are_free
from headswap.spyre.lengths import Lengths
from headswap.text.running import evaluating, is_causal

_CACHED = "max_seq_len_cached"
# One lock a model, whoever runs it: such a RoPE keeps its frequencies on the model.
_locks: WeakKeyDictionary[nn.Module, threading.Lock] = WeakKeyDictionary()
_making = threading.Lock()


class Batches:
    """Of one model: at most `size` rows in a batch, and the frequencies that a run starts with."""

    def __init__(self, model: Any, size: int, pad: int) -> None:
        self._size, self._model = size, getattr(model, "_orig_mod", model)
        self._lengths = Lengths.of(self._model)
        self._pad = pad

    def of(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Places of rows of `lengths` that run together, the longest first."""
        batch: list[int] = []
        for place in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            longest = lengths[batch[0]] if batch else lengths[place]
            other = longest != lengths[place] and self._kind(longest) != self._kind(lengths[place])
            if other or len(batch) == self._size:
                yield batch
                batch = []
            batch.append(place)
        if batch:
            yield batch

    @cached_property
    def _pads_are_free(self) -> bool:
        # Behind a text no causal model sees anything, so there is nothing to find out.
        if self._size == 1 or is_causal(self._model.config):
            return True
        with evaluating(self._model):
            return pads_are_free(self._model, self._pad)

    def _kind(self, length: int) -> int:
        """Rows of one kind may run together."""
        longrope, dynamic = self._lengths.longrope, self._lengths.dynamic
        if not self._pads_are_free or (dynamic is not None and length > dynamic):
            return length
        return -1 if longrope is not None and length > longrope else 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """A run of its own, in which RoPE remembers no earlier one."""
        with nullcontext() if self._lengths.alike is None else self._lock():
            if self._lengths.dynamic is not None:
                for module in self._model.modules():
                    for name in [n for n in vars(module) if n.endswith(_CACHED)]:
                        setattr(module, name, 0)
            yield

    def _lock(self) -> threading.Lock:
        with _making:
            return _locks.setdefault(self._model, threading.Lock())
