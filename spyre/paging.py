# SPDX-License-Identifier: Apache-2.0
"""Sequences over the paged cache: prompts in chunks, shared prefixes, steps of one token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headswap.spyre.cache import KVCache, PagedBatch, chunks, decode, prefill
from headswap.spyre.device import DeviceSpec
from headswap.spyre.errors import CapacityError, DeviceError
from headswap.spyre.hook import keep_cache
from headswap.spyre.pool import BlockPool, Lease
from headswap.spyre.prepare import Prepared
from headswap.spyre.shapes import round_up
from headswap.spyre.stack import Backend, refuse_pages

DEFAULT_TOKENS = 8_192
"""Tokens that a cache has room for where nobody says how many blocks it has."""


class Pages:
    """The paged cache of an executor: made when first needed, and where shapes are free and nobody
    said how many blocks it has, made anew for a call that needs more.

    static  as in `Paged`, where graphs are compiled
    """

    def __init__(
        self, made: Prepared, backend: Backend, block_size: int | None, num_blocks: int | None,
        static: tuple[int, int] | None,
    ) -> None:  # fmt: skip
        self._made, self._backend, self._static = made, backend, static
        self._size, self._blocks = block_size or backend.spec.block_size, num_blocks
        self.paged: Paged | None = None

    @property
    def tokens(self) -> int:
        """What it has room for where it does not grow."""
        return (self._blocks or default_blocks(self._size)) * self._size

    def room(self, rows: Sequence[Sequence[int]], new: int) -> Paged:
        """The cache, with room for `rows` and `new` tokens behind each."""
        wanted, free = self._blocks, self._backend.compiler is None
        if wanted is None and free:
            tokens = [len(row) + new for row in rows]
            wanted = blocks_together(tokens, self._size, self._backend.spec.max_decode_batch)
        grows = free and self.paged is not None and (wanted or 0) > self.paged.pool.num_blocks
        if self.paged is None or grows:
            refuse_pages(self._backend)
            self.paged = Paged(self._made, self._backend.spec, block_size=self._size,
                               num_blocks=wanted, static=self._static)  # fmt: skip
        return self.paged

    def usage(self) -> dict[str, Any] | None:
        """The pool's numbers; None before the first use."""
        return None if self.paged is None else self.paged.usage()


def default_blocks(block_size: int) -> int:
    """Blocks of a cache of which nobody says how many it has, the reserved one included."""
    return 1 + -(-DEFAULT_TOKENS // block_size)


def blocks_together(tokens: Sequence[int], block_size: int, rows: int) -> int:
    """Blocks, the reserved one included, in which the `rows` longest of sequences with so many
    `tokens` lie side by side."""
    needs = sorted((-(-count // block_size) for count in tokens), reverse=True)
    return 1 + max(sum(needs[:rows]), 1)


@dataclass(eq=False)
class Stored:
    """A text in the cache: its ids, how many of them have keys there, its blocks, what is
    done to the logits of those that are `made`, and whether they became no numbers."""

    row: int
    ids: list[int]
    lease: Lease
    stored: int = 0
    made: list[int] = field(default_factory=list)
    processors: Any = None
    broken: bool = False


class Paged:
    """A prepared causal model with a cache of `num_blocks` blocks, which never changes its size.

    static   `(rows, tokens)`: every step has that many rows, every chunk and table room for so many
             tokens, as a compiled graph needs; None where shapes are free
    """

    def __init__(
        self, made: Prepared, spec: DeviceSpec, *, block_size: int, num_blocks: int | None,
        static: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        if not made.causal:
            raise DeviceError(
                f"{type(made.model).__name__} cannot run over a paged cache: that needs attention "
                "that comes to us and looks back only, in every layer, and nothing else that mixes "
                "tokens."
            )
        self.made, self.spec, self.static = made, spec, static
        alike = made.lengths.alike or spec.max_context
        self.context = min(spec.max_context, spec.max_volume, alike)
        if static is not None:
            self.context = min(self.context, static[1])
        self.chunk = max(block_size, min(spec.chunk, self.context) // block_size * block_size)
        blocks = num_blocks or default_blocks(block_size)
        self.pool = BlockPool(blocks, block_size)
        self.dtype = made.dtype
        shapes = [layer.cache for _, layer in made.layers]
        with torch.inference_mode(False):  # plain tensors, whoever made us
            self.cache = KVCache.of(shapes, blocks, block_size, self.dtype)
        keep_cache(made.layers, self.cache.layers)
        self.shared = 0

    def usage(self) -> dict[str, int]:
        """Blocks held, kept for their prefix, and free; tokens that a known prefix saved."""
        used = self.pool.usage
        return {"held": used.held, "kept": used.kept, "free": used.free,
                "tokens_shared": self.shared}  # fmt: skip

    def check(self, row: int, tokens: int, new: int) -> None:
        """Refuse, before any work, a sequence that could never run.

        sendnn-inference's rule: the prompt rounded up to 64 and the new tokens must fit the
        context, and a row's tokens the volume.
        """
        asked = round_up(tokens) + new
        limit = self.context
        room = (self.pool.num_blocks - 1) * self.pool.block_size
        if asked > limit:
            raise CapacityError(
                f"Row {row} has {tokens} tokens and asks for {new} more: {asked} in whole steps of "
                f"64, and the context holds {limit}.",
                needed=asked, free=limit,
            )  # fmt: skip
        if tokens + new > room:
            raise CapacityError(
                f"Row {row} has {tokens} tokens and asks for {new} more, and the cache holds {room}"
                f" ({self.pool.num_blocks - 1} blocks of {self.pool.block_size}). Give "
                f"num_blocks={-(-(tokens + new) // self.pool.block_size) + 1} or more.",
                needed=tokens + new, free=room,
            )  # fmt: skip

    def admit(self, row: int, ids: Sequence[int], new: int) -> Stored:
        """Blocks for `ids` and `new` tokens; what the cache knows of them is shared."""
        lease = self.pool.admit(ids, new)
        fresh = lease.blocks[lease.cached // self.pool.block_size :]
        self.cache.zero([*{*self.pool.stale(), *fresh}])  # whoever wrote there last
        self.shared += lease.cached
        return Stored(row, list(ids), lease, stored=lease.cached)

    def release(self, sequence: Stored) -> None:
        """Give the blocks of `sequence` back."""
        if not sequence.lease.ended:
            self.pool.release(sequence.lease)

    def fits(self, ids: Sequence[int], new: int, live: Sequence[Stored] = ()) -> bool:
        """Whether `admit` would succeed now, beside `live`.

        All rows of a step count as long as the longest, and together they may not pass the device's
        volume (sendnn-inference asserts it at every step).
        """
        longest = max([len(ids) + new, *(sequence.lease.tokens for sequence in live)])
        volume = (len(live) + 1) * round_up(longest)
        return volume <= self.spec.max_volume and self.pool.can_admit(ids, new)

    @contextmanager
    def held(self) -> Iterator[list[Stored]]:
        """A list of sequences; whatever is in it at the end is released, also after an error."""
        live: list[Stored] = []
        try:
            yield live
        finally:
            for sequence in live:
                self.release(sequence)

    def prefill(self, sequence: Stored, run: Any) -> Any:
        """Run what is not stored of a prompt, chunk by chunk; `run(ids, places, batch, last)`
        gets `[1, tokens]` ids and places, and the index of the chunk's last token. Returns what
        it gave for the last chunk."""
        size = self.pool.block_size
        found: Any = None
        lease, ids = sequence.lease, sequence.ids
        width = None if self.static is None else self.pool.blocks_for(self.context + self.chunk)
        for chunk in chunks(len(ids), sequence.stored, self.chunk, size,
                            static=self.static is not None):  # fmt: skip
            batch = prefill(lease, chunk, size, width)
            text = [*ids[chunk.start : chunk.end], *[ids[chunk.start]] * chunk.right]
            places = batch.position_ids.clamp(max=chunk.end - 1)  # a table may end with the text
            found = self._run(run, [text], places, batch, chunk.end - chunk.start - 1)
            sequence.stored = chunk.end
        if bool(found.isfinite().all()):  # what is no number would meet later rows in their prefix
            self.pool.publish(lease, ids)
        return found

    def step(self, live: Sequence[Stored], run: Any) -> Any:
        """One more token for each of `live`, whose newest id has no keys yet; `run` as above."""
        filled = [sequence.stored + 1 for sequence in live]
        rows = None if self.static is None else self.static[0]
        width = None if self.static is None else self.pool.blocks_for(self.context)
        batch = decode([s.lease for s in live], filled, self.pool.block_size, rows, width)
        newest = [[s.made[-1]] for s in live]
        newest += newest[:1] * (len(batch.filled) - len(newest))
        found = self._run(run, newest, batch.position_ids, batch, 0)
        for sequence in live:
            sequence.stored += 1
        return found

    def _run(self, run: Any, ids: list[list[int]], places: Any, batch: Any, last: int) -> Any:
        for _, layer in self.made.layers:  # made on the host, before any layer runs
            batch.mask(layer.visibility, self.dtype)
        return run(torch.tensor(ids), places, batch, last)

    @property
    def rows(self) -> int:
        """Sequences that may be live at once."""
        return self.spec.max_decode_batch if self.static is None else self.static[0]


def shares(made: Prepared) -> bool:
    """Whether `run_rows` gives a model's own numbers: it is causal, counts positions from 0 and
    pools the last token."""
    spec = made.head_spec
    own = made.causal and not made.offset
    return own and spec is not None and spec.pooling == "last" and not spec.compat


def run_rows(paged: Paged, rows: Sequence[list[int]]) -> Iterator[tuple[list[int], Tensor]]:
    """Each row's index and what the head gets for it, `[1, hidden]`, one row after the other."""
    for row, ids in enumerate(rows):
        paged.check(row, len(ids), 0)

    def run(ids: Tensor, places: Tensor, batch: PagedBatch, last: int) -> Tensor:
        states: Tensor = paged.made.run(ids, places, batch)[0]
        return states[:, last]

    for row, ids in enumerate(rows):
        with paged.held() as live:
            live.append(paged.admit(row, ids, 0))
            yield [row], paged.prefill(live[0], run)
