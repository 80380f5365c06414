# SPDX-License-Identifier: Apache-2.0
"""Converts files into files: tensors are copied byte for byte, and no model is built for it.

Most conversions keep every backbone tensor under its name and drop the output matrix. These need
the memory of a head and a copy buffer. What loading changes (merged experts, registered
renamings, another dtype) takes the way over a model; `obstacle` says why.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor, nn

from headswap.convert.bidirectional import is_bidirectional
from headswap.convert.classes import head_spec
from headswap.convert.conversion import inexact, mark
from headswap.convert.derive import check_range, head_of_rows
from headswap.convert.job import Job
from headswap.convert.layouts import empty_model
from headswap.convert.weights import check_finite, safetensors_dtype

CHUNK = 1 << 20
"""Bytes that a copy holds at a time."""


@dataclass(frozen=True)
class Piece:
    """A tensor and where its bytes lie: in `file` from `start` on, or in memory (`value`)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    file: Path | None = None
    start: int = 0
    value: Tensor | None = field(default=None, compare=False)

    def read(self, rows: tuple[int, ...] | None = None) -> Tensor:
        """The tensor, or some of its rows, in memory of its own (the file is not mapped)."""
        if self.file is None:
            return self.value  # type: ignore[return-value]
        dtype = safetensors_dtype(self.dtype)
        with self.file.open("rb") as source:
            if rows is None:
                return _read(source, self.start, self.size, dtype).reshape(self.shape)
            step = self.size // self.shape[0]
            parts = [_read(source, self.start + row * step, step, dtype) for row in rows]
        return torch.stack(parts).reshape(len(rows), *self.shape[1:])


def _read(source: BinaryIO, start: int, size: int, dtype: torch.dtype) -> Tensor:
    buffer = bytearray(size)
    source.seek(start)
    if cast(io.BufferedReader, source).readinto(buffer) != size:
        raise OSError(f"{source.name} ends early")
    return torch.frombuffer(buffer, dtype=dtype) if size else torch.empty(0, dtype=dtype)


def pieces(file: Path) -> dict[str, Piece]:
    """Name -> piece of a safetensors file whose header was checked before."""
    with file.open("rb") as source:
        (length,) = struct.unpack("<Q", source.read(8))
        header = json.loads(source.read(length))
    header.pop("__metadata__", None)
    return {
        name: Piece(name, entry["dtype"], tuple(entry["shape"]), end - start, file,
                    8 + length + start)
        for name, entry in header.items()
        for start, end in [entry["data_offsets"]]
    }  # fmt: skip


@dataclass(frozen=True)
class Stream:
    """A conversion that copies: the pieces of each file to be, and the config they belong to.

    `stored` are all pieces of the source; `output` is the stored name of the output matrix.
    """

    shards: tuple[tuple[Piece, ...], ...]
    config: Any
    stored: Mapping[str, Piece]
    output: str | None


def obstacle(job: Job, dtype: torch.dtype | None) -> str | None:
    """Why the conversion can't be a copy; None if it can, as far as the job tells."""
    if job.checkpoint.adapter is not None:
        return "an adapter is merged into it"
    if job.checkpoint.quantised is not None:
        return "it is quantised"
    if job.checkpoint.stacks.parts:
        return "its head is stored in parts"
    held = {header[1] for header in job.checkpoint.headers.values()}
    if any(file.suffix != ".safetensors" for file in job.checkpoint.shards) or not held:
        return "its weights are not in safetensors"
    if dtype is not None and held != {dtype}:
        return f"its weights become {str(dtype)[6:]}"
    if job.key_mapping or job.checkpoint.layout:
        return "its tensors are renamed"
    if is_bidirectional(job.config):
        return "its attention has to be tried"
    return None


def stream(job: Job) -> Stream | None:
    """The copy that `job` comes down to; None where a tensor has another name or shape in the
    class that will read it, or where the head is not there to be taken."""
    cls, stored = job.serving.cls, {}
    for file in job.checkpoint.shards:
        stored.update(pieces(file))
    config = cls.conversion.apply(job.config)
    output = None
    head: dict[str, Tensor] = {}
    if cls.conversion.label_ids:
        output = _output_matrix(cls.lm_class, job.config, stored)
        if output is None:
            return None
        head = _derived(job, stored[output], config)
    needed = {name: tuple(t.shape) for name, t in empty_model(cls, config).state_dict().items()}
    inside = f"{cls.backbone_name}."  # BERT's pooler goes with the backbone, in its dtype
    for name in head_spec(cls, config).tensors():
        if name in stored and name not in head and not name.startswith(inside):
            head[name] = stored[name].read().float()
    check_finite(head, job.checkpoint.name)
    kept = {name: piece.shape for name, piece in stored.items() if name in needed}
    made = {**kept, **{name: tuple(tensor.shape) for name, tensor in head.items()}}
    if made != needed or inexact(config):
        return None
    return Stream(_layout(job, stored, kept, head), config, stored, output)


def _output_matrix(lm_class: Any, config: Any, stored: Mapping[str, Piece]) -> str | None:
    """The stored name of the matrix whose rows are token logits; None where that is not plain."""
    lm = empty_model(lm_class, config)
    layer: Any = lm.get_output_embeddings()
    if not isinstance(layer, nn.Linear) or getattr(layer, "bias", None) is not None:
        return None
    names = {id(module): name for name, module in lm.named_modules()}
    own = f"{names[id(layer)]}.weight"
    tied = f"{names[id(lm.get_input_embeddings())]}.weight"
    if own in stored:
        both = config.get_text_config().tie_word_embeddings and tied in stored
        return None if both else own
    return tied if tied in stored and config.get_text_config().tie_word_embeddings else None


def _derived(job: Job, matrix: Piece, config: Any) -> dict[str, Tensor]:
    conversion = job.serving.cls.conversion
    check_range(conversion.label_ids, matrix.shape[0])
    derived = head_of_rows(
        matrix.read(conversion.label_ids), None, job.config, conversion.label_ids,
        conversion.method, job.serving.cls.lm_class.__name__,
    )  # fmt: skip
    mark(config, **derived.marks)
    return {f"{head_spec(job.serving.cls, config).output.path}.weight": derived.weight}


def _layout(
    job: Job, stored: Mapping[str, Piece], kept: Mapping[str, Any], head: Mapping[str, Tensor]
) -> tuple[tuple[Piece, ...], ...]:
    """The source's files without what is dropped; the head comes last in the last one."""
    shards = [
        [stored[name] for name in headers if name in kept and name not in head]
        for headers in job.checkpoint.shards.values()
    ]
    shards = [shard for shard in shards if shard] or [[]]
    shards[-1] += [
        Piece(name, "F32", tuple(tensor.shape), 4 * tensor.numel(), value=tensor.contiguous())
        for name, tensor in head.items()
    ]
    return tuple(tuple(sorted(shard, key=_order)) for shard in shards)


def _order(piece: Piece) -> tuple[int, str]:
    """safetensors wants wide dtypes first, so that every tensor is aligned."""
    return -safetensors_dtype(piece.dtype).itemsize, piece.name


def write_stream(made: Stream, folder: Path) -> None:
    """Write the files of `made`, and an index where they are several, into `folder`."""
    count = len(made.shards)
    placed: dict[str, str] = {}
    for number, shard in enumerate(made.shards, 1):
        name = f"model-{number:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors"
        _write_file(folder / name, shard)
        placed.update(dict.fromkeys((piece.name for piece in shard), name))
    if count > 1:
        total = sum(piece.size for shard in made.shards for piece in shard)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write_file(file: Path, shard: tuple[Piece, ...]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for piece in shard:
        header[piece.name] = {"dtype": piece.dtype, "shape": list(piece.shape),
                              "data_offsets": [at, at + piece.size]}  # fmt: skip
        at += piece.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as target:
        target.write(struct.pack("<Q", len(text)) + text)
        for piece in shard:
            for chunk in _chunks(piece):
                target.write(chunk)


def _chunks(piece: Piece) -> Iterator[bytes]:
    if piece.file is None:
        yield piece.read().numpy().tobytes()
        return
    with piece.file.open("rb") as source:
        source.seek(piece.start)
        left = piece.size
        while left:
            chunk = source.read(min(CHUNK, left))
            if not chunk:
                raise OSError(f"{piece.file} ends early")
            left -= len(chunk)
            yield chunk


class OnDisk(Mapping[str, Tensor]):
    """Name -> tensor, read when asked for and not kept; `alias` leads tied names to stored ones."""

    def __init__(self, held: Mapping[str, Piece], alias: Mapping[str, str]) -> None:
        self.held, self.alias = held, alias
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.asked.add(name)
        return self.held[self.alias.get(name, name)].read().float()

    def __iter__(self) -> Iterator[str]:
        return iter({**self.held, **self.alias})

    def __len__(self) -> int:
        return len({**self.held, **self.alias})
