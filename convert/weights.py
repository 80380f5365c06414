# SPDX-License-Identifier: Apache-2.0
"""Weight files of a checkpoint: which they are and what their headers say. No code in them runs."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from headswap.registry.errors import CheckpointError

Header = tuple[tuple[int, ...], torch.dtype]
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16,
           "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
           "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
           "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}  # fmt: skip


def read_json(file: Path, default: dict[str, Any] | list[Any] | None = None) -> Any:
    """The JSON object in `file`; with `default`, a value of its kind, or it where there is no file.

    Raises `CheckpointError` for anything else.
    """
    if default is not None and not file.is_file():
        return default
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} can't be read as JSON: {error}", path=str(file)) from error
    if not isinstance(found, list if isinstance(default, list) else dict):
        kind = "list" if isinstance(default, list) else "object"
        raise CheckpointError(f"{file} holds no JSON {kind}.", path=str(file))
    return found


def read_shards(folder: Path) -> dict[Path, dict[str, Header]]:
    """File -> name -> (shape, dtype) of the tensors in `folder`, from headers alone.

    safetensors (one file or sharded) first, then pickled .bin files, read with `weights_only`.
    Raises `CheckpointError` for no weights, a damaged file, a name in two files, or an index that
    names a file outside the folder or a tensor that its file lacks.
    """
    for single, read in zip(_WEIGHTS, (safetensors_headers, pickled_headers), strict=True):
        index, listed = _index(folder, single)
        if (folder / single).exists():
            if set(listed.values()) - {single}:
                raise CheckpointError(
                    f"{folder} has both {single} and {index.name}, which names other files; "
                    "remove the one that does not belong to these weights.",
                    path=str(folder),
                )
            listed = listed or {"": single}
        if listed:
            files = [folder / name for name in sorted(set(listed.values()))]
            shards = {file: guarded(file, read) for file in files}
            _check_index(index, listed, shards)
            return shards
    raise CheckpointError(
        f"{folder} has no model*.safetensors and no pytorch_model*.bin.", path=str(folder)
    )


def has_weights(folder: Path) -> bool:
    """Whether `folder` holds safetensors or pickled weights."""
    names = (n for name in _WEIGHTS for n in (name, f"{name}.index.json"))
    return any((folder / name).exists() for name in names)


def read_tensors(
    folder: Path, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, torch.Tensor]:
    """The tensors in `folder` with a `wanted` name, mapped where the format allows."""
    from safetensors import safe_open

    found: dict[str, torch.Tensor] = {}
    for file, headers in read_shards(folder).items():
        names = [name for name in headers if wanted(name)]
        if file.suffix == ".safetensors":
            with safe_open(str(file), framework="pt") as handle:
                found.update({name: handle.get_tensor(name) for name in names})
        else:
            state = _unpickled(file, "cpu", mmap=zipfile.is_zipfile(file))
            found.update({name: state[name] for name in names})
    return found


def read_metadata(folder: Path) -> dict[str, str]:
    """What the safetensors files in `folder` say of themselves."""
    from safetensors import safe_open

    found: dict[str, str] = {}
    for file in read_shards(folder):
        if file.suffix == ".safetensors":
            with safe_open(str(file), framework="pt") as handle:
                found.update(handle.metadata() or {})
    return found


def _index(folder: Path, single: str) -> tuple[Path, dict[str, str]]:
    """The index beside `single`, and the file of each tensor that it lists ({} for no index)."""
    index = folder / f"{single}.index.json"
    if not index.exists():
        return index, {}
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(
            f"{index}: weight_map is {_brief(listed)}; it must map names of tensors to files.",
            path=str(index),
        )
    for name in listed.values():
        if not _is_file_in(folder, name):
            raise CheckpointError(
                f"{index} names the file {_brief(name)}, which is not a file in that folder.",
                path=str(index),
            )
    return index, listed


def _is_file_in(folder: Path, name: Any) -> bool:
    """Whether `name` is a plain name of a file in `folder`. The file may be a link (a hub cache is
    made of them): what a link leads to, its owner chose; what a name leads to, the index did."""
    if not isinstance(name, str) or "\0" in name or Path(name).name != name:
        return False
    return (folder / name).is_file()


def _check_index(
    index: Path, listed: Mapping[str, str], shards: Mapping[Path, Mapping[str, Header]]
) -> None:
    held: dict[str, str] = {}
    for file, headers in shards.items():
        for name in headers:
            if name in held:
                raise CheckpointError(
                    f"{name} is stored in {held[name]} and in {file.name}; remove one of the two.",
                    path=str(file),
                )
            held[name] = file.name
    for name, file_name in listed.items():
        if name and held.get(name) != file_name:
            raise CheckpointError(
                f"{index} says that {name} is in {file_name}, which does not hold it. A file is "
                "missing, or belongs to another checkpoint.",
                path=str(index),
            )


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."


def guarded(file: Path, read: Callable[[Path], dict[str, Header]]) -> dict[str, Header]:
    try:
        return read(file)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{file} can't be read: {str(error) or type(error).__name__}", path=str(file)
        ) from error


def safetensors_headers(file: Path) -> dict[str, Header]:
    from safetensors import safe_open

    with safe_open(str(file), framework="pt") as handle:
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
        return {
            name: (tuple(part.get_shape()), safetensors_dtype(part.get_dtype()))
            for name, part in slices.items()
        }


def safetensors_dtype(name: str) -> torch.dtype:
    """torch's word for safetensors'; `ValueError` if it has none."""
    if name not in _DTYPES:
        raise ValueError(f"unknown dtype {name}")
    return _DTYPES[name]


def pickled_headers(file: Path) -> dict[str, Header]:
    state = _unpickled(file, "meta")
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}


def _unpickled(file: Path, device: str, **options: Any) -> dict[str, torch.Tensor]:
    """The tensors of a pickled file; only tensors and plain values are ever built."""
    state = torch.load(file, map_location=device, weights_only=True, **options)
    if not isinstance(state, Mapping):
        raise ValueError(f"it holds {_kind(state)}, not a mapping of names to tensors")
    for name, value in state.items():
        if isinstance(value, Mapping):
            raise ValueError(
                f"its tensors lie one level down, under {name!r}, so it is a training state; save "
                f"torch.load(...)[{name!r}] in its place"
            )
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise ValueError(f"{name!r} is {_kind(value)}, where a named tensor belongs")
        if value.layout is not torch.strided:
            raise ValueError(f"{name} is stored as {value.layout}; save it as a dense tensor")
    return dict(state)


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


def check_numbers(headers: Mapping[str, Header], drops: Callable[[str], Any], name: str) -> None:
    """Refuse whole numbers where weights belong, in a checkpoint `name` that is not quantised:
    the loader would take them for floats, without the scale that they stand for."""
    for tensor, (_, dtype) in headers.items():
        if tensor.endswith((".weight", ".bias")) and not (dtype.is_floating_point or drops(tensor)):
            raise CheckpointError(
                f"{name}: {tensor} is stored as {str(dtype)[6:]}, and config.json"
                " has no quantization_config that says how to read it.",
                path=name,
                tensor=tensor,
            )


def check_finite(tensors: Mapping[str, torch.Tensor], name: str) -> None:
    """Refuse head tensors of the checkpoint `name` that hold a NaN or an infinity."""
    for tensor, values in tensors.items():
        if not values.is_meta and not bool(values.isfinite().all()):
            raise CheckpointError(
                f"{name}: {tensor} holds a NaN or an infinity; every score would be one. Take the "
                "weights of an earlier training step.",
                path=name,
                tensor=tensor,
            )
