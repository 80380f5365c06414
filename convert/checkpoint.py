# SPDX-License-Identifier: Apache-2.0
"""Opens a checkpoint: its config and the headers of its tensors. No tensor is read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headswap.convert.conversion import stock_name
from headswap.convert.fields import check_fields
from headswap.convert.gguf import gguf_tokenizer
from headswap.convert.modules import cross_encoder_activation
from headswap.convert.onnx import find_onnx, read_onnx
from headswap.convert.quantised import Quantisation, forget_settings, make_readable, quantisation
from headswap.convert.rotation import read_rotation
from headswap.convert.stacked import Stacks
from headswap.convert.weights import (
    Header,
    has_weights,
    read_json,
    read_metadata,
    read_shards,
    read_tensors,
)
from headswap.heads import keep_temperature
from headswap.registry import global_registry
from headswap.registry.errors import ArchitectureError, CheckpointError

if TYPE_CHECKING:
    from headswap.convert.adapter import Adapter

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json",
                   "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
                   "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
                   "chat_template.json")  # fmt: skip
_DOWNLOADS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a config and weights. `raw` is config.json as stored ({} for a GGUF file).

    Under a PEFT adapter, `adapter_head` holds the adapter's stored name of each head tensor that
    it brings, and `head_labels` the config fields that name this head's labels (None: `raw` does).
    `stacks` are tensors of the head that are stored in parts; `layout` is the name under which a
    stored tensor is read, where that is another.
    """

    folder: Path
    config: Any
    raw: Mapping[str, Any]
    gguf_file: str | None = None
    trusted: bool = False
    onnx_file: str | None = None
    adapter: Adapter | None = None
    adapter_head: Mapping[str, str] = field(default_factory=dict)
    head_labels: Mapping[str, Any] | None = None
    stacks: Stacks = field(default_factory=Stacks)
    layout: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """How messages call this checkpoint."""
        file = self.gguf_file or self.onnx_file
        own = str(self.folder / file if file else self.folder)
        return f"{own} with adapter {self.adapter.folder}" if self.adapter else own

    def beside(self, *names: str) -> Path:
        """The folder that holds one of the files `names`: the adapter's first, else the own."""
        first = self.adapter.folder if self.adapter else self.folder
        return first if any((first / name).exists() for name in names) else self.folder

    @property
    def architecture(self) -> str | None:
        """The class that the checkpoint says it is; None where it says nothing (GGUF)."""
        named = self.raw.get("architectures") or getattr(self.config, "architectures", None)
        return str(named[0]) if named else None

    @cached_property
    def stored(self) -> Mapping[str, Header]:
        """Shape and dtype of every stored tensor, read from headers; {} for GGUF (whose names are
        llama.cpp's and are translated when it is loaded)."""
        if self.onnx_file:
            return {name: (tuple(t.shape), t.dtype) for name, t in self._onnx.items()}
        return {name: header for part in self.shards.values() for name, header in part.items()}

    @cached_property
    def shards(self) -> Mapping[Path, Mapping[str, Header]]:
        """The same, file by file; {} for what is not a folder of weights."""
        if self.gguf_file or self.onnx_file:
            return {}
        make_readable(self.raw)
        return read_shards(self.folder)

    @cached_property
    def quantised(self) -> Quantisation | None:
        """How the weights are stored, if not plainly; `CheckpointError` if they can't be read."""
        if self.gguf_file or self.onnx_file:
            return None
        return quantisation(self.raw, self.stored, lambda want: read_tensors(self.folder, want),
                            lambda: read_metadata(self.folder), self.name)  # fmt: skip

    @cached_property
    def plain(self) -> Mapping[str, Header]:
        """Like `stored`, with each quantised weight as the plain one (fp32) that it becomes."""
        return self.stored if self.quantised is None else self.quantised.headers(self.stored)

    @cached_property
    def headers(self) -> Mapping[str, Header]:
        """Like `plain`, with parts of the head stacked, under the names of `layout`, and with the
        adapter's head in place of the own."""
        plain = self.stacks.headers(self.plain)
        plain = {self.layout.get(name, name): header for name, header in plain.items()}
        if self.adapter is None:
            return plain
        held = self.adapter.headers
        return {**plain, **{name: held[stored] for name, stored in self.adapter_head.items()}}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of `headers`; quantised ones dequantised, parts stacked."""
        found = dict(self._onnx) if self.onnx_file else read_tensors(self.folder)
        plain = found if self.quantised is None else self.quantised.plain(found)
        plain = self.stacks.tensors(plain)
        return {self.layout.get(name, name): tensor for name, tensor in plain.items()}

    @cached_property
    def _onnx(self) -> dict[str, torch.Tensor]:
        return read_onnx(self.folder / str(self.onnx_file))

    @property
    def has_tokenizer(self) -> bool:
        """Whether tokenizer files lie beside the weights."""
        folder = self.tokenizer_folder
        return bool(self.gguf_file) or any((folder / f).exists() for f in TOKENIZER_FILES[:7])

    @property
    def tokenizer_folder(self) -> Path:
        """Where the tokenizer's files lie: the adapter's folder if it has them."""
        return self.beside(*TOKENIZER_FILES[:7])

    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer; `CheckpointError` if it has none or it can't be read."""
        from transformers import AutoTokenizer

        extra: dict[str, Any] = {"gguf_file": self.gguf_file} if self.gguf_file else {}
        extra["trust_remote_code"] = self.trusted
        try:
            found = AutoTokenizer.from_pretrained(str(self.tokenizer_folder), **extra)
            return gguf_tokenizer(found, self.folder / self.gguf_file) if self.gguf_file else found
        except Exception as error:
            raise CheckpointError(
                f"{self.name}: no tokenizer could be read ({error}). Put the tokenizer's files "
                "beside the weights, or pass tokenizer=.",
                path=self.name,
            ) from error


def open_checkpoint(
    path: Any, *, trust_remote_code: bool = False, revision: str | None = None
) -> Checkpoint:
    """The checkpoint at `path`: a folder, a .gguf or .onnx file, a folder with one, or a hub id (of
    the given revision).

    Raises `CheckpointError` saying what was found there.
    """
    folder, file = _locate(path, revision)
    if file and file.endswith(".gguf"):
        config = _auto_config(folder, trust_remote_code, {}, gguf_file=file)
        return Checkpoint(folder, config, {}, file, trust_remote_code)
    raw = read_json(folder / "config.json")
    check_fields(raw, folder / "config.json")
    config = _read_config(folder, raw, trust_remote_code)
    config = read_rotation(config, raw, str(folder))
    forget_settings(config)
    keep_temperature(config, raw)
    activation = cross_encoder_activation(folder)
    if activation is not None:  # it decides by whatever route the checkpoint is loaded
        config.sentence_transformers = {"activation_fn": activation}
    return Checkpoint(folder, config, raw, trusted=trust_remote_code, onnx_file=file)


def local_folder(path: Any, revision: str | None = None) -> Path:
    """`path` itself if it exists, else the local snapshot of the hub repository of that name."""
    if not isinstance(path, str | os.PathLike) or not str(path) or "\0" in str(path):
        raise CheckpointError(
            f"{path!r} is no path; pass a folder, a .gguf file or a hub id.", path=str(path)
        )
    folder = Path(path).expanduser()
    return folder if folder.exists() else _download(str(path), revision)


def _locate(path: Any, revision: str | None) -> tuple[Path, str | None]:
    folder = local_folder(path, revision)
    if folder.is_file() and folder.suffix == ".gguf":
        return folder.parent, folder.name
    if folder.is_file() and folder.suffix == ".onnx":
        above = folder.parent.parent  # optimum puts the graph into a folder beside the config
        home = folder.parent if (folder.parent / "config.json").exists() else above
        return home, folder.relative_to(home).as_posix()
    if not folder.is_dir():
        raise CheckpointError(
            f"{path} is not a checkpoint folder, a .gguf or an .onnx file.", path=str(path)
        )
    if (folder / "config.json").exists():
        return folder, None if has_weights(folder) else find_onnx(folder)
    found = sorted(file.name for file in folder.glob("*.gguf"))
    if len(found) == 1:
        return folder, found[0]
    raise CheckpointError(
        f"{folder} has no config.json"
        + (f" and {len(found)} .gguf files; name one of: {', '.join(found)}." if found else "."),
        path=str(folder),
    )


def _download(name: str, revision: str | None) -> Path:
    """The local snapshot of a hub repository (transformers' own cache and offline rules apply)."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=_DOWNLOADS))
        if not any(folder.glob("*.safetensors")):
            snapshot_download(name, revision=revision, allow_patterns=["*.bin", "*.gguf"])
        return folder
    except Exception as error:
        raise CheckpointError(
            f"{name!r} is neither a folder here nor a repository that can be had: {error}",
            path=name,
        ) from error


def _read_config(folder: Path, raw: Mapping[str, Any], trust: bool) -> Any:
    named = raw.get("architectures") or [None]
    known = _registered_config(stock_name(str(named[0]))) if named[0] else None
    return _auto_config(folder, trust, raw, known)


def _registered_config(architecture: str) -> Any:
    """The config class of an architecture that a downstream project registered."""
    try:
        entry = global_registry.resolve(architecture).entry
    except ArchitectureError:
        return None
    return None if entry.owner == "transformers" else getattr(entry.load(), "config_class", None)


def _auto_config(
    folder: Path, trust: bool, raw: Mapping[str, Any], known: Any = None, **extra: Any
) -> Any:
    """The config in `folder`, as the class `known` (default: whichever its model type names)."""
    from transformers import AutoConfig

    try:
        if known is not None:
            return known.from_pretrained(str(folder))
        return AutoConfig.from_pretrained(str(folder), trust_remote_code=trust, **extra)
    except ImportError as error:
        hint = " Install it with: pip install gguf" if "gguf" in str(error).lower() else ""
        raise CheckpointError(
            f"{folder}: reading its config needs a package that is missing: {error}.{hint}",
            path=str(folder),
        ) from error
    except Exception as error:
        remote = raw.get("auto_map")
        if remote and not trust:
            from headswap.convert.remote import needs_consent

            named = raw.get("architectures") or ["its config"]
            raise needs_consent(str(folder), remote, str(named[0])) from error
        raise CheckpointError(
            f"{folder}: its config can't be read: {error}", path=str(folder)
        ) from error
