# SPDX-License-Identifier: Apache-2.0
"""Opens a checkpoint: its config and the headers of its tensors. No tensor is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from headswap.convert.conversion import stock_name
from headswap.convert.gguf import gguf_tokenizer
from headswap.registry import global_registry
from headswap.registry.errors import ArchitectureError, CheckpointError

Header = tuple[tuple[int, ...], torch.dtype]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json",
                   "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
                   "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
                   "chat_template.json")  # fmt: skip
_DOWNLOADS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16,
           "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
           "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
           "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a config and weights. `raw` is config.json as stored ({} for a GGUF file)."""

    folder: Path
    config: Any
    raw: Mapping[str, Any]
    gguf_file: str | None = None
    trusted: bool = False

    @property
    def name(self) -> str:
        """How messages call this checkpoint."""
        return str(self.folder / self.gguf_file if self.gguf_file else self.folder)

    @property
    def architecture(self) -> str | None:
        """The class that the checkpoint says it is; None where it says nothing (GGUF)."""
        named = self.raw.get("architectures") or getattr(self.config, "architectures", None)
        return str(named[0]) if named else None

    @cached_property
    def headers(self) -> Mapping[str, Header]:
        """Shape and dtype of every stored tensor, read from headers; {} for GGUF (whose names are
        llama.cpp's and are translated when it is loaded)."""
        return {} if self.gguf_file else read_headers(self.folder)

    @property
    def has_tokenizer(self) -> bool:
        """Whether tokenizer files lie beside the weights."""
        return bool(self.gguf_file) or any((self.folder / f).exists() for f in TOKENIZER_FILES[:7])

    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer; `CheckpointError` if it has none or it can't be read."""
        from transformers import AutoTokenizer

        extra: dict[str, Any] = {"gguf_file": self.gguf_file} if self.gguf_file else {}
        extra["trust_remote_code"] = self.trusted
        try:
            found = AutoTokenizer.from_pretrained(str(self.folder), **extra)
            return gguf_tokenizer(found, self.folder / self.gguf_file) if self.gguf_file else found
        except Exception as error:
            raise CheckpointError(
                f"{self.name}: no tokenizer could be read ({error}). Put the tokenizer's files "
                "beside the weights, or pass tokenizer=.",
                path=self.name,
            ) from error


def open_checkpoint(path: Any, *, trust_remote_code: bool = False) -> Checkpoint:
    """The checkpoint at `path`: a folder, a .gguf file, a folder with one, or a hub id.

    Raises `CheckpointError` saying what was found there.
    """
    folder, gguf_file = _locate(path)
    if gguf_file:
        config = _auto_config(folder, trust_remote_code, {}, gguf_file=gguf_file)
        return Checkpoint(folder, config, {}, gguf_file, trust_remote_code)
    raw = _read_json(folder / "config.json")
    config = _read_config(folder, raw, trust_remote_code)
    return Checkpoint(folder, config, raw, trusted=trust_remote_code)


def _locate(path: Any) -> tuple[Path, str | None]:
    folder = Path(path).expanduser()
    if folder.is_file() and folder.suffix == ".gguf":
        return folder.parent, folder.name
    if not folder.exists():
        folder = _download(str(path))
    if not folder.is_dir():
        raise CheckpointError(f"{path} is not a checkpoint folder or a .gguf file.", path=str(path))
    if (folder / "config.json").exists():
        return folder, None
    found = sorted(file.name for file in folder.glob("*.gguf"))
    if len(found) == 1:
        return folder, found[0]
    raise CheckpointError(
        f"{folder} has no config.json"
        + (f" and {len(found)} .gguf files; name one of: {', '.join(found)}." if found else "."),
        path=str(folder),
    )


def _download(name: str) -> Path:
    """The local snapshot of a hub repository (transformers' own cache and offline rules apply)."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=_DOWNLOADS))
        if not any(folder.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=["*.bin", "*.gguf"])
        return folder
    except Exception as error:
        raise CheckpointError(
            f"{name!r} is neither a folder here nor a repository that can be had: {error}",
            path=name,
        ) from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} can't be read as JSON: {error}", path=str(file)) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds no JSON object.", path=str(file))
    return found


def _read_config(folder: Path, raw: Mapping[str, Any], trust: bool) -> Any:
    named = raw.get("architectures") or [None]
    known = _registered_config(stock_name(str(named[0]))) if named[0] else None
    if known is not None:
        return known.from_pretrained(str(folder))
    return _auto_config(folder, trust, raw)


def _registered_config(architecture: str) -> Any:
    """The config class of an architecture that a downstream project registered."""
    try:
        entry = global_registry.resolve(architecture).entry
    except ArchitectureError:
        return None
    return None if entry.owner == "transformers" else getattr(entry.load(), "config_class", None)


def _auto_config(folder: Path, trust: bool, raw: Mapping[str, Any], **extra: Any) -> Any:
    from transformers import AutoConfig

    try:
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


def read_headers(folder: Path) -> dict[str, Header]:
    """Name -> (shape, dtype) of the tensors in `folder`, from headers alone.

    safetensors (one file or sharded) first, then pickled .bin files, read with `weights_only`.
    Raises `CheckpointError` for no weights, a damaged file, or an index that names a file outside
    the folder.
    """
    for pattern, read in (("model*.safetensors", _safetensors), ("pytorch_model*.bin", _pickled)):
        files = _files(folder, pattern)
        if files:
            headers: dict[str, Header] = {}
            for file in files:
                headers.update(_guarded(file, read))
            return headers
    raise CheckpointError(
        f"{folder} has no model*.safetensors and no pytorch_model*.bin.", path=str(folder)
    )


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor in `folder`, whose headers were read before; mapped where the format allows."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in _files(folder, "model*.safetensors"):
        found.update(load_file(file))
    for file in [] if found else _files(folder, "pytorch_model*.bin"):
        found.update(torch.load(file, map_location="cpu", weights_only=True, mmap=True))
    return found


def _files(folder: Path, pattern: str) -> list[Path]:
    index = folder / f"{pattern.replace('*', '')}.index.json"
    if not index.exists():
        single = folder / pattern.replace("*", "")
        return [single] if single.exists() else []
    names = sorted(set(_read_json(index).get("weight_map", {}).values()))
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).exists():
            raise CheckpointError(
                f"{index} names the file {name!r}, which is not a file in that folder.",
                path=str(index),
            )
    return [folder / name for name in names]


def _guarded(file: Path, read: Any) -> dict[str, Header]:
    try:
        found: dict[str, Header] = read(file)
    except Exception as error:
        raise CheckpointError(f"{file} can't be read: {error}", path=str(file)) from error
    return found


def _safetensors(file: Path) -> dict[str, Header]:
    from safetensors import safe_open

    with safe_open(str(file), framework="pt") as handle:
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
        return {
            name: (tuple(part.get_shape()), _dtype(part.get_dtype()))
            for name, part in slices.items()
        }


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(f"unknown dtype {name}")
    return _DTYPES[name]


def _pickled(file: Path) -> dict[str, Header]:
    state = torch.load(file, map_location="meta", weights_only=True)
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
