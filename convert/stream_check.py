# SPDX-License-Identifier: Apache-2.0
"""Compares a copied checkpoint with its source, layer by layer, each read when it runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.hooks import attach_align_device_hook, remove_hook_from_module
from accelerate.utils import set_module_tensor_to_device
from torch import Tensor

from headswap.convert.checkpoint import Checkpoint
from headswap.convert.conversion import text_field
from headswap.convert.job import Job
from headswap.convert.layouts import empty_model
from headswap.convert.loading import check_tensors, head_tensors, meta_state, read_class
from headswap.convert.model import ConvertedModel
from headswap.convert.reference import Wanted, batch, token_logits
from headswap.convert.stream import OnDisk, Piece, Stream, pieces
from headswap.convert.verify import sample_rows


def disk_model(
    cls: Any, config: Any, held: Mapping[str, Piece], output: str | None = None
) -> tuple[Any, OnDisk]:
    """A `cls` model, fp32, that reads each layer's weights when it runs and drops them after.

    `output` is the stored name of the output matrix. Takes the memory of the largest layer.
    """
    model = empty_model(cls, config)
    alias = {}
    layer = model.get_output_embeddings()
    if output is not None and layer is not None:
        names = {id(module): name for name, module in model.named_modules()}
        alias = {f"{names[id(layer)]}.weight": output}
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in held and held[name].shape == tuple(buffer.shape):
                buffer.copy_(held[name].read())
    weights = OnDisk(held, alias)
    attach_align_device_hook(model, torch.device("cpu"), offload=True, weights_map=weights)
    for name in head_tensors(model) if isinstance(model, ConvertedModel) else ():
        # Our head is computed from its numbers and not called as a module, so no hook would run.
        remove_hook_from_module(model.get_submodule(name.rpartition(".")[0]))
        set_module_tensor_to_device(model, name, "cpu", value=weights[name])
    return model, weights


def _all_asked(model: Any, weights: OnDisk) -> None:
    """`ValueError` for a weight that no layer asked for: torch computes with tensors that have no
    data, in places without an error, and gives whatever lies in memory."""
    unused = {name for name, _ in model.named_parameters(remove_duplicate=False)} - weights.asked
    if unused:
        raise ValueError(f"{min(unused)} was not read")


def wanted_logits(job: Job, made: Stream) -> Wanted:
    """The source's own fp32 logits `[rows, labels]` for `sample_rows`."""
    cls = job.serving.cls
    rows = sample_rows(job)
    if cls.conversion.label_ids:
        model, weights = disk_model(cls.lm_class, job.config, made.stored, made.output)
        found = token_logits(model, rows, cls.conversion)
        _all_asked(model, weights)
        return found
    return Wanted.of(_logits(disk_model(_reader(job), made.config, made.stored), rows))


def written_logits(job: Job, folder: Path) -> Tensor:
    """The same of the written folder, whose tensors must fit the class that will read them."""
    cls = _reader(job)
    config = cls.config_class.from_pretrained(str(folder))
    written = Checkpoint(folder, config, {})
    state = meta_state(dict(written.headers))
    _, info = read_class(cls, None, config=config, state_dict=state, device_map={"": "meta"})
    check_tensors(cls, folder, info)
    held = {name: piece for file in written.shards for name, piece in pieces(file).items()}
    return _logits(disk_model(cls, config, held), sample_rows(job))


def _reader(job: Job) -> Any:
    """The class that reads the result: transformers' own for a stock one, else ours."""
    return job.serving.cls.source_class if job.serving.stock else job.serving.cls


def _logits(loaded: tuple[Any, OnDisk], rows: Any) -> Tensor:
    # Not verify's run(): the model says that it is on "meta", and computes on CPU.
    model, weights = loaded
    batched = text_field(model.config, "pad_token_id") is not None
    batches = [rows] if batched else [[row] for row in rows]
    found = [model(**dict(batch(model.config, part))).logits.float() for part in batches]
    _all_asked(model, weights)
    return torch.cat(found)
