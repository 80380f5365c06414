# SPDX-License-Identifier: Apache-2.0
"""Files that are damaged, or made to do harm, are named in an error; nothing in them runs."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import alone, rows, tiny

import headswap

SEQ = "AutoModelForSequenceClassification"
HEAD = "score.weight"
Break = Callable[[Path], Any]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`one` (a single file) and `many` (three shards) of one tiny classifier."""
    root = tmp_path_factory.mktemp("originals")
    model = tiny("llama", SEQ, num_labels=2)
    model.save_pretrained(root / "one")
    model.save_pretrained(root / "many", max_shard_size="40KB")
    assert len(list((root / "many").glob("model-*.safetensors"))) == 3
    return root


@pytest.fixture
def one(originals: Path, tmp_path: Path) -> Path:
    return shutil.copytree(originals / "one", tmp_path / "one")


@pytest.fixture
def many(originals: Path, tmp_path: Path) -> Path:
    return shutil.copytree(originals / "many", tmp_path / "many")


def refused(folder: Path, message: str, error: Any = headswap.CheckpointError) -> None:
    """Both the plan and the model are refused, with a message that names the place."""
    for ask in (headswap.plan, headswap.load):
        with pytest.raises(error, match=message):
            ask(folder)


# -- safetensors ----------------------------------------------------------------------------------


def header(change: Callable[[dict[str, Any]], Any], size: int | None = None) -> Break:
    """Rewrite the header (and its stated length) of model.safetensors around the same data."""

    def apply(folder: Path) -> None:
        file = folder / "model.safetensors"
        raw = file.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        content = json.loads(raw[8 : 8 + length])
        made = change(content)
        text = made if isinstance(made, bytes) else json.dumps(content).encode()
        stated = len(text) if size is None else size
        file.write_bytes(struct.pack("<Q", stated) + text + raw[8 + length :])

    return apply


def entry(**values: Any) -> Break:
    return header(lambda content: content[HEAD].update(values))


def same_bytes_twice(content: dict[str, Any]) -> None:
    first, second, *_ = [name for name in content if name != "__metadata__"]
    content[second] = content[first]


HEADERS: dict[str, Break] = {
    "a length past the end": header(lambda _: None, size=10**6),
    "a length of 2**63": header(lambda _: None, size=2**63),
    "a length of -1": header(lambda _: None, size=2**64 - 1),
    "no JSON": header(lambda _: b"x" * 200),
    "a list": header(lambda _: b"[]"),
    "deep JSON": header(lambda _: b'{"a":' * 5000),
    "too few bytes": entry(data_offsets=[0, 4]),
    "offsets past the end": entry(data_offsets=[0, 10**9]),
    "overlapping tensors": header(same_bytes_twice),
    "a shape that overflows": entry(shape=[2**40, 2**40]),
    "a negative shape": entry(shape=[-2, 32]),
    "an unknown dtype": entry(dtype="F6_X"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_wrong_header_names_the_file(one: Path, case: str) -> None:
    HEADERS[case](one)
    refused(one, r"model\.safetensors can't be read")


def test_a_truncated_shard_is_named(many: Path) -> None:
    shard = sorted(many.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-64])
    refused(many, shard.name)


# -- indexes --------------------------------------------------------------------------------------


def edit(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def index_of(folder: Path) -> Path:
    return folder / "model.safetensors.index.json"


@pytest.mark.parametrize("value", [None, [1], 3, "x", {}])
def test_a_weight_map_of_another_form_is_refused(many: Path, value: Any) -> None:
    edit(index_of(many), lambda index: index.update(weight_map=value))
    refused(many, r"index\.json: weight_map is")


@pytest.mark.parametrize("name", [
    "../one/model.safetensors", "..", "", "/etc/passwd", "gone.safetensors", "a\0b", 3, None, ["a"],
    {"a": 1},
])  # fmt: skip
def test_an_index_cannot_name_a_file_elsewhere(originals: Path, many: Path, name: Any) -> None:
    shutil.copytree(originals / "one", many.parent / "one")
    edit(index_of(many), lambda index: index["weight_map"].update({HEAD: name}))
    refused(many, "is not a file in that folder")


def test_a_link_that_leads_to_a_hub_cache_is_followed(many: Path, tmp_path: Path) -> None:
    wanted = alone(headswap.load(many), rows())
    for shard in many.glob("model-*.safetensors"):
        blob = tmp_path / f"blob {shard.name}"
        shard.rename(blob)
        shard.symlink_to(blob)
    torch.testing.assert_close(alone(headswap.load(many), rows()), wanted)
    blob.unlink()
    refused(many, "is not a file in that folder")


def test_a_tensor_that_its_file_lacks_is_named(many: Path) -> None:
    edit(index_of(many), lambda i: i["weight_map"].update(ghost=i["weight_map"][HEAD]))
    refused(many, r"says that ghost is in model-\d")


def test_a_tensor_in_another_file_than_the_index_says_is_named(many: Path) -> None:
    others = {f.name for f in many.glob("model-*.safetensors")}
    listed = json.loads(index_of(many).read_text())["weight_map"]
    other = min(others - {listed[HEAD]})
    edit(index_of(many), lambda index: index["weight_map"].update({HEAD: other}))
    refused(many, rf"says that {HEAD} is in {other}")


def test_a_tensor_in_two_files_is_named(many: Path) -> None:
    first, second, _ = sorted(many.glob("model-*.safetensors"))
    state, more = load_file(second), load_file(first)
    name = min(more)
    save_file({**state, name: more[name] + 1}, second, metadata={"format": "pt"})
    refused(many, rf"{name} is stored in {first.name} and in {second.name}")


def test_a_single_file_beside_an_index_of_others_is_refused(one: Path, many: Path) -> None:
    """transformers would read the one and other tools the others."""
    shutil.copy(one / "model.safetensors", many)
    refused(many, r"has both model\.safetensors and")


# -- pickled files --------------------------------------------------------------------------------


class Payload:
    """Unpickling this makes the file `mark`."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def pickled(folder: Path, content: Any, zipped: bool = True) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(
        content, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("how", ["zip", "legacy", "plain pickle", "sharded"])
def test_code_in_a_pickle_is_not_run(one: Path, tmp_path: Path, how: str) -> None:
    mark = tmp_path / "ran"
    state = {**load_file(one / "model.safetensors"), "evil": Payload(mark)}
    pickled(one, state, zipped=how != "legacy")
    file = one / "pytorch_model.bin"
    if how == "plain pickle":
        file.write_bytes(pickle.dumps({"evil": Payload(mark)}))
    if how == "sharded":
        file.rename(one / "pytorch_model-1.bin")
        listed = dict.fromkeys(state, "pytorch_model-1.bin")
        (one / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": listed}))
    refused(one, r"pytorch_model.*\.bin can't be read")
    assert not mark.exists()
    if how == "plain pickle":  # the payload does work, were it unpickled
        pickle.loads(file.read_bytes())
        assert mark.exists()


@pytest.mark.parametrize(("content", "message"), [
    (lambda state: {"state_dict": state, "epoch": 3}, r"one level down, under 'state_dict'"),
    (lambda state: {"model": state}, r"one level down, under 'model'"),
    (lambda _: [1, 2], "holds a list"),
    (lambda _: torch.zeros(3), "holds a Tensor"),
    (lambda _: {1: torch.zeros(2)}, "1 is a Tensor"),
    (lambda state: {**state, "step": 3}, "'step' is a int"),
    (lambda state: {**state, HEAD: state[HEAD].to_sparse()}, rf"{HEAD} is stored as .*sparse"),
])  # fmt: skip
def test_a_pickle_of_something_else_says_what_it_is(one: Path, content: Any, message: str) -> None:
    pickled(one, content(load_file(one / "model.safetensors")))
    refused(one, message)


def test_a_damaged_pickle_is_named(one: Path) -> None:
    pickled(one, load_file(one / "model.safetensors"))
    file = one / "pytorch_model.bin"
    for data in (file.read_bytes()[:-2000], b""):
        file.write_bytes(data)
        refused(one, r"pytorch_model\.bin can't be read: \w")


# -- config.json ----------------------------------------------------------------------------------


def test_json_that_is_too_deep_is_named(one: Path) -> None:
    (one / "config.json").write_text('{"a":' * 100000 + "1" + "}" * 100000)
    refused(one, r"config\.json can't be read as JSON")


@pytest.mark.parametrize("data", ['{"a": "é"}'.encode("latin-1"), "{}".encode("utf-16")])
def test_a_config_in_another_encoding_is_named(one: Path, data: bytes) -> None:
    (one / "config.json").write_bytes(data)
    refused(one, r"config\.json can't be read as JSON: 'utf-8'")


FIELDS: list[tuple[str, Any]] = [
    ("text_config", "x"),
    ("text_config", [1]),
    ("architectures", 3),
    ("architectures", True),
    ("architectures", {"a": 1}),
    ("architectures", "LlamaForSequenceClassification"),
    ("architectures", [3]),
    ("architectures", [None]),
    ("model_type", 3),
    ("label2id", ["a", "b"]),
    ("label2id", {"a": "x", "b": 1}),
    ("label2id", {"a": None, "b": 1}),
    ("id2label", ["a", "b"]),
    ("id2label", 3),
    ("num_labels", "two"),
    ("num_labels", -1),
    ("pad_token_id", "x"),
    ("pad_token_id", [1]),
    ("pad_token_id", 1.5),
    ("pad_token_id", True),
    ("pad_token_id", 10**30),
    ("auto_map", "modeling.Model"),
    ("auto_map", ["x"]),
    ("auto_map", {"AutoConfig": 3}),
    ("quantization_config", "x"),
    ("headswap", "x"),
    ("headswap", {"task": 3}),
    ("headswap", {"head": ["x"]}),
    ("headswap", {"softcap": "x"}),
]


@pytest.mark.parametrize(("field", "value"), FIELDS)
def test_a_field_of_another_form_is_named(one: Path, field: str, value: Any) -> None:
    edit(one / "config.json", lambda config: config.update({field: value}))
    refused(one, rf"config\.json: {field} is ")


def test_an_empty_list_of_architectures_is_served_by_model_type(one: Path) -> None:
    edit(one / "config.json", lambda config: config.update(architectures=[]))
    assert headswap.plan(one).ok


@pytest.mark.parametrize(("field", "value"), [
    ("pad_token_id", 10**6), ("hidden_size", -32), ("num_attention_heads", 0),
    ("vocab_size", 10**13),
])  # fmt: skip
def test_sizes_that_no_model_has_are_refused(one: Path, field: str, value: int) -> None:
    edit(one / "config.json", lambda config: config.update({field: value}))
    with pytest.raises(headswap.HeadswapError):
        headswap.load(one)


def test_modules_json_of_another_form_is_named(one: Path) -> None:
    for content in (
        "3",
        '["x"]',
        "{",
        '[{"path": "../two", "type": "sentence_transformers.models.Pooling"}]',
    ):
        (one / "modules.json").write_text(content)
        with pytest.raises(headswap.CheckpointError, match=r"modules\.json"):
            headswap.load(one, task="embed")


# -- heads ----------------------------------------------------------------------------------------


def put(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    state = load_file(folder / "model.safetensors")
    state[name] = change(state[name])
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_head_that_is_not_finite_is_named(one: Path, value: float) -> None:
    put(one, HEAD, lambda tensor: tensor.index_fill(1, torch.tensor(3), value))
    with pytest.raises(headswap.CheckpointError, match=rf"{HEAD} holds a NaN or an infinity"):
        headswap.load(one)


@pytest.mark.parametrize("name", [HEAD, "model.norm.weight"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_whole_numbers_for_weights_are_named(one: Path, name: str, dtype: torch.dtype) -> None:
    put(one, name, lambda tensor: tensor.to(dtype))
    refused(one, rf"{name} is stored as {str(dtype)[6:]}, and config\.json has no quant")


@pytest.mark.parametrize(("shape", "error"), [
    ((), headswap.CheckpointError), ((0, 32), headswap.LabelError), ((2, 32, 1),
     headswap.CheckpointError),
])  # fmt: skip
def test_a_head_of_another_shape_is_named(one: Path, shape: Any, error: Any) -> None:
    put(one, HEAD, lambda _: torch.ones(shape))
    refused(one, HEAD, error)


# -- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [None, 3, b"x", "", "a\0b"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    refused(path, "is no path")


@pytest.mark.parametrize(("option", "value"), [
    ("device", "gpu"), ("device", 3.5), ("dtype", "float32"), ("dtype", torch.int8), ("dtype", 3),
])  # fmt: skip
def test_a_place_or_dtype_that_is_none_is_refused(one: Path, option: str, value: Any) -> None:
    with pytest.raises(headswap.ConversionError, match=f"{option}="):
        headswap.load(one, **{option: value})
