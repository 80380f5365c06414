# SPDX-License-Identifier: Apache-2.0
"""Where keys and values lie: one pair of paged tensors a layer, and which rows a step touches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headswap.spyre.errors import DeviceError
from headswap.spyre.masks import additive
from headswap.spyre.pool import Lease
from headswap.spyre.visibility import Visibility

PADDING_BLOCK = 0
"""Nobody's block: keys and values of pads are written there (FMS' paged cache)."""


@dataclass(frozen=True, slots=True)
class Pages:
    """One layer's keys and values, `[blocks, block_size, kv_heads, head_dim]` each."""

    key: Tensor
    value: Tensor

    def store(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write keys and values `[tokens, kv_heads, head_dim]` to `slots` `[tokens]` (int64:
        block x block_size + place in it)."""
        self.key.flatten(0, 1).index_copy_(0, slots, key)
        self.value.flatten(0, 1).index_copy_(0, slots, value)

    def read(self, batch: PagedBatch) -> tuple[Tensor, Tensor]:
        """Keys and values `[batch, kv_heads, blocks x block_size, head_dim]` of a step's tables."""
        return _read(self.key, batch), _read(self.value, batch)


def _read(pages: Tensor, batch: PagedBatch) -> Tensor:
    rows, blocks = batch.tables.shape
    if batch.run is not None:
        found = pages[batch.run[0] : batch.run[1] + 1]
    else:
        found = pages.index_select(0, batch.tables.flatten())
    return found.view(rows, blocks * pages.shape[1], *pages.shape[2:]).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class KVCache:
    """The pages of all layers; as many blocks in each, whatever runs (a changed count would mean
    a compile: sendnn-inference)."""

    layers: tuple[Pages, ...]

    @classmethod
    def of(
        cls, shapes: Sequence[tuple[int, int, int]], num_blocks: int, block_size: int,
        dtype: torch.dtype,
    ) -> KVCache:  # fmt: skip
        """Zeros for layers of `(kv_heads, key_dim, value_dim)`."""
        return cls(
            tuple(
                Pages(*(torch.zeros(num_blocks, block_size, heads, dim, dtype=dtype)
                        for dim in (key_dim, value_dim)))
                for heads, key_dim, value_dim in shapes
            )
        )  # fmt: skip

    def zero(self, blocks: Sequence[int]) -> None:
        """Zero `blocks` in every layer: a device's softmax leaves a little weight on what is
        masked (torch-spyre), and a NaN there would stay one on any device."""
        if not blocks:
            return
        index = torch.tensor(list(blocks))
        for pages in self.layers:
            pages.key.index_fill_(0, index, 0)
            pages.value.index_fill_(0, index, 0)


@dataclass(frozen=True, slots=True, eq=False)
class PagedBatch:
    """One step over the cache: `batch` rows of `queries` new tokens each.

    tables    int64 `[batch, blocks]`: each row's blocks; a shorter row's table is filled up with
              its own last block, so that no row reads what is not its own
    slots     int64 `[batch, queries]`: where the new keys and values go; pads to block 0
    filled    int64 `[batch]`: places taken after this step, pads included; query j stands at place
              filled - queries + j
    left      int64 `[batch]`: pads at the row's start; a key at place k is seen from place q where
              left <= k <= q, and within the window (FMS' paged operators)
    run       first and last block, where one row's blocks lie side by side: nothing is copied then
    masks     additive masks by (causal, window), made once a step and not in every layer
    """

    tables: Tensor
    slots: Tensor
    filled: Tensor
    left: Tensor
    block_size: int
    run: tuple[int, int] | None = None
    masks: dict[tuple[bool, int | None], Tensor] = field(default_factory=dict)

    @property
    def places(self) -> Tensor:
        """The queries' places, int64 `[batch, queries]`."""
        queries = self.slots.shape[1]
        return (self.filled - queries).unsqueeze(1) + torch.arange(queries)

    @property
    def position_ids(self) -> Tensor:
        """The queries' positions in their text, int64 `[batch, queries]`; 0 for left pads."""
        return (self.places - self.left.unsqueeze(1)).clamp(min=0)

    def seen(self, visibility: Visibility) -> Tensor:
        """Bool `[batch, 1, queries, keys]`, keys in the order of the tables."""
        keys = torch.arange(self.tables.shape[1] * self.block_size)
        places = self.places
        real = (keys >= self.left.unsqueeze(1)) & (keys < self.filled.unsqueeze(1))
        return (visibility.of(places, keys) & real.unsqueeze(1)).unsqueeze(1)

    def mask(self, visibility: Visibility, dtype: torch.dtype) -> Tensor:
        """`seen` as an additive mask."""
        key = (visibility.causal, visibility.window)
        if key not in self.masks:
            self.masks[key] = additive(self.seen(visibility), dtype)
        return self.masks[key]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a prompt that runs at once: ids from `start` to `end`, and how many pads stand
    after them."""

    start: int
    end: int
    right: int = 0


def chunks(tokens: int, cached: int, size: int, block_size: int, *, static: bool) -> list[Chunk]:
    """How a prompt of `tokens`, of which `cached` are known, runs in chunks of at most `size`.

    A `static` plan gives every chunk `size` places, filled up on the right with pads, which go to
    block 0; otherwise chunks are as long as their tokens.
    """
    if size < 1 or size % block_size:
        raise DeviceError(
            f"A prefill chunk of {size} tokens is no positive multiple of the block size "
            f"{block_size}.",
            value=size,
            step=block_size,
        )
    found = []
    for start in range(cached, tokens, size):
        end = min(start + size, tokens)
        found.append(Chunk(start, end, right=size - (end - start) if static else 0))
    return found


def prefill(lease: Lease, chunk: Chunk, block_size: int, blocks: int | None = None) -> PagedBatch:
    """The step that runs `chunk` of the sequence that holds `lease`; its table is `blocks` long
    (default: what the chunk needs)."""
    places = torch.arange(chunk.start, chunk.end)
    slots = _slots(lease, places, block_size)
    if chunk.right:
        slots = torch.cat([slots, _spare(chunk.right, block_size)])
    filled = chunk.end + chunk.right
    needed = -(-chunk.end // block_size)
    return PagedBatch(
        tables=_tables([lease.blocks[:needed]], max(blocks or 0, -(-filled // block_size))),
        slots=slots.unsqueeze(0),
        filled=torch.tensor([filled]),
        left=torch.zeros(1, dtype=torch.int64),
        block_size=block_size,
        run=None if blocks or chunk.right else _side_by_side([lease.blocks[:needed]]),
    )


def decode(
    leases: Sequence[Lease], filled: Sequence[int], block_size: int, rows: int | None = None,
    blocks: int | None = None,
) -> PagedBatch:  # fmt: skip
    """The step that gives each sequence one token more, of which it then has `filled`.

    `rows` and `blocks` pad the step up to a compiled shape: filler rows see one place of block 0.
    """
    held = [lease.blocks[: -(-count // block_size)] for lease, count in zip(leases, filled,
                                                                        strict=True)]  # fmt: skip
    extra = max(0, (rows or 0) - len(held))
    spare = _spare(extra, block_size).tolist()
    slots = [
        lease.blocks[(count - 1) // block_size] * block_size + (count - 1) % block_size
        for lease, count in zip(leases, filled, strict=True)
    ]
    return PagedBatch(
        tables=_tables([*held, *[[PADDING_BLOCK]] * extra], blocks or 0),
        slots=torch.tensor([*slots, *spare]).unsqueeze(1),
        filled=torch.tensor([*filled, *(place + 1 for place in spare)]),
        left=torch.tensor([*[0] * len(held), *spare]),
        block_size=block_size,
        run=None if rows or blocks else _side_by_side(held),
    )


def _side_by_side(held: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """First and last block of a single row, if no other block lies between them."""
    if len(held) != 1 or any(b - a != 1 for a, b in itertools.pairwise(held[0])):
        return None
    return held[0][0], held[0][-1]


def _tables(held: Sequence[Sequence[int]], blocks: int) -> Tensor:
    width = max(blocks, *(len(each) for each in held))
    return torch.tensor([[*each, *[each[-1]] * (width - len(each))] for each in held])


def _slots(lease: Lease, places: Tensor, block_size: int) -> Tensor:
    blocks = torch.tensor(lease.blocks)
    return blocks[places // block_size] * block_size + places % block_size


def _spare(count: int, block_size: int) -> Tensor:
    """Places of block 0 for `count` pads, over and over: nobody reads them."""
    return torch.arange(count) % block_size + PADDING_BLOCK * block_size
