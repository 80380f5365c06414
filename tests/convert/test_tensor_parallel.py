# SPDX-License-Identifier: Apache-2.0
"""Two processes over gloo, split by transformers' own plan, give the single process's logits.

The processes are started once; each runs every case and keeps what it found, by name.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import padded, rows, tiny

import headswap
from headswap.convert.parallel import loader_options, rows_of
from headswap.registry.errors import ConversionError, UnsupportedHeadError

LIMIT = 120
FAMILIES = [f"{kind}-{tied}" for kind in ("llama", "qwen2") for tied in ("untied", "tied")]
# Of the 99 rows the first rank holds 50 and the second 49; each request needs both.
REQUESTS: dict[str, dict[str, Any]] = {
    "one": {"label_tokens": [3, 97], "method": "difference"},
    "three": {"label_tokens": [98, 49, 50], "method": "rows"},
}
BATCH = padded(rows(), [2, 0, 1, 4], 12)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(**BATCH).logits
    return found


def causal(folder: Path) -> Any:
    import transformers

    split = loader_options("auto", None)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **split)


def _derived(folder: Path, request: str) -> dict[str, Any]:
    lm = causal(folder)
    model = headswap.as_seq_cls_model(lm, **REQUESTS[request])
    found = {"memory": logits(model), "weight": model.score.weight.detach()}
    found["source"] = lm(**BATCH, use_cache=False).logits.detach()
    model.save_pretrained(folder / request, is_main_process=os.environ["RANK"] == "0")
    found["loaded"] = logits(headswap.load(folder, tp_plan="auto", **REQUESTS[request]))
    return found


def _untrained(folder: Path) -> dict[str, Any]:
    torch.manual_seed(int(os.environ["RANK"]))
    lm = causal(folder)
    model = headswap.as_seq_cls_model(lm, num_labels=3).eval()
    loaded = headswap.load(folder, num_labels=3, allow_untrained_head=True, tp_plan="auto")
    states = headswap.as_embedding_model(model).eval()(**BATCH).pooler_output.detach()
    return {"memory": logits(model), "loaded": logits(loaded), "states": states}


@torch.no_grad()
def _replaced(folder: Path) -> bool:
    """Whether a split projection of the copy runs with its own weight, once that is another."""
    mlp = headswap.as_seq_cls_model(causal(folder), **REQUESTS["one"]).backbone.layers[0].mlp
    before = bool(mlp(torch.ones(1, 1, 32)).any())
    mlp.down_proj.weight = torch.nn.Parameter(torch.zeros_like(mlp.down_proj.weight))
    return before and not bool(mlp(torch.ones(1, 1, 32)).any())


def _rows(_: Path) -> dict[str, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    index = torch.tensor([2, 0, 4])
    found = {}
    for name, tensor in MATRICES.items():
        for split in [Replicate(), *(Shard(dim) for dim in range(tensor.ndim))]:
            held = distribute_tensor(tensor, mesh, [split])
            found[f"{name} {split}"] = rows_of(held, index, tuple(tensor.shape))
    return found


MATRICES = {
    "weight": torch.arange(15.0).reshape(5, 3),
    "bias": torch.arange(5.0),
    "bf16": torch.arange(15.0).reshape(5, 3).to(torch.bfloat16),
}


def _part(folder: Path) -> str:
    """The error for a matrix of which this process holds a part and does not know the rest."""
    lm = causal(folder)
    whole = lm.lm_head.weight
    whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
    rank = int(os.environ["RANK"])
    lm.lm_head.weight = torch.nn.Parameter(whole.detach().chunk(2)[rank].clone())
    with pytest.raises(UnsupportedHeadError) as error:
        headswap.as_seq_cls_model(lm, **REQUESTS["one"])
    return str(error.value)


def _device(folder: Path) -> str:
    with pytest.raises(ConversionError) as error:
        headswap.load(folder, tp_plan="auto", device="cpu", **REQUESTS["one"])
    return str(error.value)


def cases() -> Iterator[tuple[str, str, Callable[[Path], Any]]]:
    """Name, checkpoint and what to run."""
    for family in FAMILIES:
        for request in REQUESTS:
            yield f"{family} {request}", family, lambda path, r=request: _derived(path, r)
    yield "untrained", FAMILIES[0], _untrained
    yield "replaced", FAMILIES[0], _replaced
    yield "rows", FAMILIES[0], _rows
    yield "part", FAMILIES[0], _part
    yield "device", FAMILIES[0], _device
    yield "stored", "stored", lambda path: logits(headswap.load(path, tp_plan="auto"))


def _process(rank: int, root: Path, port: int) -> None:
    """One of the two: runs every case, in the same order as the other."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # fmt: skip
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    found = {name: run(root / checkpoint) for name, checkpoint, run in cases()}
    torch.save(found, root / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the checkpoints."""
    folder = tmp_path_factory.mktemp("split")
    for family in FAMILIES:
        kind, tied = family.split("-")
        tiny(kind, tie_word_embeddings=tied == "tied").save_pretrained(folder / family)
    stored = tiny("llama", "AutoModelForSequenceClassification", num_labels=3)
    stored.save_pretrained(folder / "stored")
    return folder


@pytest.fixture(scope="module")
def ranks(root: Path) -> list[dict[str, Any]]:
    """What each of the two processes found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = torch.multiprocessing.start_processes(
        _process, (root, port), nprocs=2, join=False, start_method="spawn"
    )
    end = time.monotonic() + LIMIT
    try:
        while not running.join(timeout=max(0.0, end - time.monotonic())):  # one may end first
            if time.monotonic() > end:
                pytest.fail(f"the two processes did not end within {LIMIT} s")
    finally:
        for process in running.processes:
            process.kill()
    return [torch.load(root / f"rank{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_both_ranks_score_as_a_single_process_does(
    family: str, request_name: str, root: Path, ranks: list[dict[str, Any]]
) -> None:
    single = headswap.load(root / family, **REQUESTS[request_name])
    wanted = logits(single)
    again = logits(headswap.load(root / family / request_name))
    torch.testing.assert_close(again, wanted, atol=1e-5, rtol=0)
    for rank in ranks:
        found = rank[f"{family} {request_name}"]
        torch.testing.assert_close(found["memory"], wanted, atol=1e-5, rtol=0)
        torch.testing.assert_close(found["loaded"], wanted, atol=1e-5, rtol=0)
        assert type(found["weight"]) is torch.Tensor
        assert torch.equal(found["weight"], single.score.weight)


def test_the_ranks_agree_to_the_bit(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    for name in (n for n in first if n.partition(" ")[0] in FAMILIES):
        for key, value in first[name].items():
            assert torch.equal(value, second[name][key]), (name, key)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_source_still_gives_its_own_token_logits(
    family: str, root: Path, ranks: list[dict[str, Any]]
) -> None:
    import transformers

    lm = transformers.AutoModelForCausalLM.from_pretrained(root / family, dtype=torch.float32)
    for rank in ranks:
        found = rank[f"{family} one"]["source"]
        torch.testing.assert_close(found, logits(lm), atol=1e-5, rtol=0)


def test_a_stored_head_scores_as_in_its_own_class(root: Path, ranks: list[dict[str, Any]]) -> None:
    wanted = logits(headswap.load(root / "stored"))
    for rank in ranks:
        torch.testing.assert_close(rank["stored"], wanted, atol=1e-5, rtol=0)


def test_an_untrained_head_is_the_same_on_both_ranks(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["untrained"] for rank in ranks)
    for key, value in first.items():
        assert torch.equal(value, second[key]), key


def test_a_split_embedder_gives_the_states_of_a_single_process(
    root: Path, ranks: list[dict[str, Any]]
) -> None:
    model = headswap.load(root / FAMILIES[0], task="embed")
    with torch.no_grad():
        wanted = model(**BATCH).pooler_output
    torch.testing.assert_close(ranks[0]["untrained"]["states"], wanted, atol=1e-5, rtol=0)


def test_a_split_copy_runs_its_own_modules(ranks: list[dict[str, Any]]) -> None:
    assert [rank["replaced"] for rank in ranks] == [True, True]


def test_rows_come_whole_from_any_split(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert len(rank["rows"]) == 8
        for name, found in rank["rows"].items():
            wanted = MATRICES[name.split()[0]][[2, 0, 4]].float()
            assert found.dtype == torch.float32
            assert torch.equal(found, wanted), name


def test_a_part_of_a_matrix_is_refused_and_never_indexed(ranks: list[dict[str, Any]]) -> None:
    assert "shape [50, 32] where its module says [99, 32]" in ranks[0]["part"]
    assert "shape [49, 32] where its module says [99, 32]" in ranks[1]["part"]


def test_a_device_beside_a_plan_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert "leave out device='cpu'" in ranks[0]["device"]
