# SPDX-License-Identifier: Apache-2.0
"""What a PEFT adapter's files say, and what its base's checkpoint becomes under it. No tensor is
read here; `merging.py` lets PEFT do the arithmetic."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from headswap.convert.checkpoint import Checkpoint, local_folder, open_checkpoint
from headswap.convert.classes import head_spec
from headswap.convert.conversion import label_pairs
from headswap.convert.labels import check_label_map
from headswap.convert.weights import (
    Header,
    guarded,
    pickled_headers,
    read_json,
    safetensors_headers,
)
from headswap.registry import Task
from headswap.registry.errors import CheckpointError, WeightError

CONFIG = "adapter_config.json"
_TENSORS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_TASKS: Mapping[str, Task] = {
    "SEQ_CLS": "classify",
    "TOKEN_CLS": "token-classify",
    "FEATURE_EXTRACTION": "embed",
}
"""What PEFT's word for the task of an adapter asks for; the others say nothing of a head."""
_LABEL_FIELDS = ("id2label", "label2id", "num_labels")
_PREFIX = "base_model.model."
# A stored name that still holds its adapter's name, as whole state dicts do: `lora_A.NAME.weight`.
_NAMED = re.compile(r"\.lora_(?:[AB]|embedding_[AB]|magnitude_vector)\.([^.]+)(?:\.weight)?$")


@dataclass(frozen=True)
class Adapter:
    """An adapter's folder. `raw` is adapter_config.json, `said` the config.json beside it ({} if
    there is none), `headers` what is stored, `names` what each stored tensor is called in the
    model that was adapted (the base's own copies, which PEFT keeps beside a trained head, have no
    entry), `copies` the second of two stored names of one tensor -> the first."""

    folder: Path
    raw: Mapping[str, Any]
    said: Mapping[str, Any]
    headers: Mapping[str, Header]
    names: Mapping[str, str]
    copies: Mapping[str, str]

    @property
    def kind(self) -> str:
        """PEFT's word for the method, such as LORA."""
        return str(self.raw.get("peft_type"))

    @property
    def task(self) -> Task | None:
        """The task that the adapter was trained for; None where PEFT's word says nothing of it."""
        return _TASKS.get(str(self.raw.get("task_type")))

    def read(self) -> dict[str, torch.Tensor]:
        """Every stored tensor, by its stored name.

        Raises `WeightError` for one that is stored twice, with different numbers.
        """
        found = self._read()
        for second, first in self.copies.items():
            if not torch.equal(found[first], found[second]):
                raise WeightError(
                    f"{self.folder} holds {first} and {second}, which are one tensor, with "
                    "different numbers; remove one.",
                    missing=(),
                    unexpected=(second,),
                )
        return found

    def _read(self) -> dict[str, torch.Tensor]:
        file = self.folder / _TENSORS
        if file.exists():
            from safetensors.torch import load_file

            return load_file(file)
        found: dict[str, torch.Tensor] = torch.load(
            self.folder / _PICKLE, map_location="cpu", weights_only=True
        )
        return found


def open_source(path: Any, adapter: Any = None, *, trust_remote_code: bool = False) -> Checkpoint:
    """The checkpoint at `path`, under the adapter at `adapter`; or, where `path` is an adapter's
    own folder, the base that its config names, under it.

    Raises `CheckpointError` for a base that can't be had, and for a folder that is both.
    """
    if adapter is not None:
        _refuse_adapter(path, "pass the checkpoint that it was trained on, with adapter=")
        return _under(open_adapter(adapter), path, None, trust_remote_code)
    if not _is_adapter(path):
        return open_checkpoint(path, trust_remote_code=trust_remote_code)
    found = open_adapter(path)
    base, revision = found.raw.get("base_model_name_or_path"), found.raw.get("revision")
    if not base:
        raise CheckpointError(
            f"{found.folder / CONFIG} names no base model; pass its folder, with adapter={path!s}.",
            path=str(path),
        )
    try:
        _refuse_adapter(base, "merge that one into its base first")
        return _under(found, base, revision, trust_remote_code)
    except CheckpointError as error:
        raise CheckpointError(
            f"{found.folder / CONFIG} names the base {base!r}, which can't be opened: {error} "
            f"Pass the base's folder, with adapter={str(path)!r}.",
            path=str(path),
        ) from error


def _is_adapter(path: Any) -> bool:
    """Whether `path` holds an adapter; a hub id is fetched first, unless it is a file's name."""
    return (local_folder(path) / CONFIG).exists()


def _refuse_adapter(path: Any, advice: str) -> None:
    if _is_adapter(path):
        raise CheckpointError(f"{path} holds an adapter ({CONFIG}); {advice}.", path=str(path))


def _under(adapter: Adapter, base: Any, revision: str | None, trust: bool) -> Checkpoint:
    checkpoint = open_checkpoint(base, trust_remote_code=trust, revision=revision)
    if checkpoint.gguf_file:
        raise CheckpointError(
            f"{checkpoint.name} is a GGUF file; an adapter needs its base as safetensors or .bin.",
            path=checkpoint.name,
        )
    return replace(checkpoint, adapter=adapter)


def open_adapter(path: Any) -> Adapter:
    """The adapter at `path` (a folder or a hub id): its configs and the headers of its tensors.

    Raises `CheckpointError` for a folder that is none, or that holds a whole model as well.
    """
    folder = local_folder(path)
    if not (folder / CONFIG).exists():
        raise CheckpointError(f"{folder} holds no adapter: no {CONFIG}.", path=str(folder))
    whole = [*folder.glob("model*.safetensors"), *folder.glob("pytorch_model*.bin")]
    if whole:
        # transformers would read the adapter's base in place of these weights.
        raise CheckpointError(
            f"{folder} holds a whole model ({whole[0].name}) and an adapter ({CONFIG}); keep one "
            "of the two there.",
            path=str(folder),
        )
    headers = _headers(folder)
    said = folder / "config.json"
    return Adapter(folder, read_json(folder / CONFIG), read_json(said, {}),
                   headers, *plain_names(headers))  # fmt: skip


def _headers(folder: Path) -> Mapping[str, Header]:
    for name, read in ((_TENSORS, safetensors_headers), (_PICKLE, pickled_headers)):
        if (folder / name).exists():
            return guarded(folder / name, read)
    raise CheckpointError(f"{folder} has no {_TENSORS} and no {_PICKLE}.", path=str(folder))


def plain_names(stored: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Stored name -> name without PEFT's prefix, its wrapper of trained modules and the adapter's
    own name, the base's copies inside that wrapper left out; and, of two stored names that become
    one, the longer -> the shorter (PEFT's `bias="all"` writes the biases of a head twice).

    Raises `WeightError` for several adapters in one file.
    """
    kept = [name for name in stored if ".original_module." not in name]
    named = {found[1] for name in kept if (found := _NAMED.search(name))} - {"weight"}
    if len(named) > 1:
        raise WeightError(
            f"The file holds several adapters ({', '.join(sorted(named))}); save each on its own.",
            missing=(),
            unexpected=(),
        )
    own = re.escape(next(iter(named), "default"))
    first: dict[str, str] = {}
    copies = {}
    for name in sorted(kept, key=len):
        taken = first.setdefault(_plain(name, own), name)
        if taken != name:
            copies[name] = taken
    return {name: plain for plain, name in first.items()}, copies


def _plain(name: str, own: str) -> str:
    name = name.removeprefix(_PREFIX)
    name = re.sub(rf"\.modules_to_save(?:\.{own})?\.", ".", name)
    return re.sub(rf"(\.lora_[^.]+)\.{own}(?=\.|$)", r"\1", name)


def with_head(checkpoint: Checkpoint, cls: Any, named: bool) -> Checkpoint:
    """`checkpoint` with the adapter's head, if it brings one, in place of its own, and with the
    labels of that head. `named` says that the request counts or names the labels.
    """
    if checkpoint.adapter is None or cls.conversion.task == "embed":
        return checkpoint
    adapter, spec = checkpoint.adapter, head_spec(cls, cls.conversion.apply(checkpoint.config))
    head = _head(adapter, [layer.path for layer in spec.stored])
    output = head.get(f"{spec.output.path}.weight")
    if output is None:
        return replace(checkpoint, adapter_head=head)
    said = _said_labels(adapter, adapter.headers[output][0][0])
    config = copy.deepcopy(checkpoint.config)
    for name in ("id2label", "label2id", "problem_type"):
        if said.get(name):
            setattr(config, name, said[name])
    raw = {k: v for k, v in checkpoint.raw.items() if k not in _LABEL_FIELDS} | said
    labels = said if said else {} if named else None
    return replace(
        checkpoint, adapter_head=head, config=config,
        raw=checkpoint.raw if labels is None else raw, head_labels=labels,
    )  # fmt: skip


def _head(adapter: Adapter, paths: list[str]) -> dict[str, str]:
    """Name of a head's tensor -> the stored name of the adapter's trained copy of it."""
    stored = {plain: name for name, plain in adapter.names.items()}
    found = {}
    for wanted in (f"{path}.{kind}" for path in paths for kind in ("weight", "bias")):
        inner = [plain for plain in stored if plain.endswith(f".{wanted}")]
        if wanted in stored or len(inner) == 1:
            found[wanted] = stored[wanted if wanted in stored else inner[0]]
    return found


def _said_labels(adapter: Adapter, rows: int) -> dict[str, Any]:
    """The labels and problem type of the config.json beside the adapter; {} where it has none, or
    no more than the two labels that transformers makes up for a causal model."""
    pairs = label_pairs(adapter.said.get("id2label"))
    if pairs is None or (len(pairs) != rows and [n for _, n in pairs] == ["LABEL_0", "LABEL_1"]):
        return {}
    check_label_map(adapter.said)
    names = dict(pairs)
    label2id = {name: index for index, name in pairs}
    kept = {"id2label": names, "label2id": label2id}
    problem = adapter.said.get("problem_type")
    return {**kept, "problem_type": problem} if problem else kept


def trained_head(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The adapter's head, by the names that it has in the model."""
    if checkpoint.adapter is None or not checkpoint.adapter_head:
        return {}
    tensors = checkpoint.adapter.read()
    return {name: tensors[stored] for name, stored in checkpoint.adapter_head.items()}
