# SPDX-License-Identifier: Apache-2.0
"""The command line as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import headswap
from tiny_models import tiny, word_tokenizer

from headswap.cli.cache import cached
from headswap.cli.demo import LABELS, SHOWN, read_sentences
from headswap.cli.packages import INSTALL, Weights, locate
from headswap.registry import CheckpointError

SEQ = "AutoModelForSequenceClassification"


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "llama"
    tiny("llama").save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def classifier(causal: Path) -> Path:
    target = causal.parent / "classifier"
    found = headswap("convert", causal, target, "--label-token", "no", "--label-token", "yes",
                     "--template", "good {text}")  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "loads with stock transformers" in found.stdout
    assert "1 derived" in found.stdout
    return target


def test_inspect_says_what_would_be_done(causal: Path) -> None:
    found = headswap("inspect", causal, "--label-id", 7, "--label-id", 41, "--json")
    plan = json.loads(found.stdout)
    assert found.returncode == 0
    assert plan["result"] == "LlamaForSequenceClassification"
    assert plan["labels"] == ["token 7", "token 41"]
    assert plan["device"] == "none"


def test_inspect_checks_the_graphs_against_a_stacks_rules(classifier: Path) -> None:
    found = headswap("inspect", classifier, "--device", "spyre", "--json")
    assert found.returncode == 0, found.stderr
    broken = {f["rule"] for f in json.loads(found.stdout)["rules"]["findings"]}
    assert "R5" in broken  # a hidden size of 32
    assert not {"R4", "R9"} & broken  # heads are padded
    printed = headswap("inspect", classifier, "--device", "sendnn").stdout
    assert "rules      sendnn" in printed
    wrong = headswap("inspect", classifier, "--device", "cuda")
    assert wrong.returncode == 3
    assert "known are sendnn, spyre" in wrong.stderr


def test_inspect_fails_where_loading_would(causal: Path) -> None:
    found = headswap("inspect", causal, "--device", "spyre")
    assert found.returncode == 1
    assert "missing: score.weight" in found.stdout
    assert "not looked at" in found.stdout
    assert "no Spyre compiler found" in found.stdout


def test_verify_prints_the_differences(classifier: Path) -> None:
    found = headswap("verify", classifier, "--json")
    report = json.loads(found.stdout)
    assert found.returncode == 0
    assert report["ok"]
    names = [case["name"] for case in report["cases"]]
    assert names == ["alone", "padded right", "padded left", "pairs"]
    assert all(c["difference"] is None or c["difference"] <= 1e-5 for c in report["cases"])


def test_rerank_prints_documents_from_the_best_on(causal: Path, tmp_path: Path) -> None:
    lines = tmp_path / "documents.jsonl"
    lines.write_text('{"text": "w5 w6"}\n"w7"\n')
    found = headswap("rerank", causal, "w1 w2", "w3 w4", "--file", lines, "--json", "--top-n", 2,
                     "--label-id", 4, "--label-id", 5, "--method", "difference",
                     "--template", "good {query} w9 {document}")  # fmt: skip
    assert found.returncode == 0, found.stderr
    hits = [json.loads(line) for line in found.stdout.splitlines()]
    assert len(hits) == 2
    assert hits[0]["score"] >= hits[1]["score"]
    given = ["w3 w4", "w5 w6", "w7"]
    assert all(hit["document"] == given[hit["index"]] for hit in hits)


def test_embed_prints_a_vector_a_text(causal: Path) -> None:
    found = headswap(
        "embed", causal, "--json", "--dimensions", 8, "--normalize", stdin="w1\nw2 w3\n"
    )
    assert found.returncode == 0, found.stderr
    rows = [json.loads(line) for line in found.stdout.splitlines()]
    assert [row["text"] for row in rows] == ["w1", "w2 w3"]
    for row in rows:
        assert len(row["embedding"]) == 8
        assert sum(number**2 for number in row["embedding"]) == pytest.approx(1, abs=1e-5)
    plain = headswap("embed", causal, "w1")
    assert len(plain.stdout.split("\t")) == 32


def test_rerank_refuses_what_has_no_score(causal: Path) -> None:
    found = headswap("rerank", causal, "w1", "w2")
    assert found.returncode == 3
    assert "It can: generate, embed" in found.stderr


def test_classify_takes_arguments_files_and_standard_input(
    classifier: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("w3 w4\n\nw5\n")
    (tmp_path / "b.jsonl").write_text('{"text": "w6 w7"}\n"w8"\n')
    found = headswap("classify", classifier, "w1 w2", "-", "--file", tmp_path / "a.txt", "--file",
                     tmp_path / "b.jsonl", "--json", stdin="w9\n")  # fmt: skip
    answers = [json.loads(line) for line in found.stdout.splitlines()]
    texts = ["w1 w2", "w9", "w3 w4", "w5", "w6 w7", "w8"]
    assert [answer["text"] for answer in answers] == texts
    own = word_tokenizer()
    model = tiny("llama")
    for answer in answers:
        ids = own(f"good {answer['text']}")["input_ids"]
        logits = model(torch.tensor([ids])).logits[0, -1, own.convert_tokens_to_ids(["no", "yes"])]
        assert answer["logits"] == pytest.approx(logits.tolist(), abs=1e-5)
        assert answer["label"] == ["no", "yes"][int(logits.argmax())]


def test_answers_in_a_pipe_are_tab_separated_and_nothing_else(classifier: Path) -> None:
    found = headswap("classify", classifier, stdin="w1\nw2 w3\n")
    lines = [line.split("\t") for line in found.stdout.splitlines()]
    assert [line[2] for line in lines] == ["w1", "w2 w3"]
    assert {line[0] for line in lines} <= {"no", "yes"}
    assert "%" not in found.stderr


@pytest.mark.parametrize(("arguments", "status", "text"), [
    (("inspect", "/no/such/folder"), 3, "/no/such/folder"),
    (("inspect",), 2, "Missing argument"),
    (("nonsense",), 2, "No such command"),
    (("classify", "{lm}", "w1"), 3, "label_tokens"),
    (("classify", "{cls}"), 3, "No text"),
    (("classify", "{cls}", "--file", "/no/file"), 3, "/no/file"),
    (("classify", "{cls}", "w1", "--activation", "foo"), 3, "identity"),
    (("classify", "{cls}", "w1", "--dtype", "int8"), 2, "float32"),
    (("classify", "{cls}", "w1", "--max-length", "1"), 3, "fixed parts"),
    (("convert", "{lm}", "{cls}", "--label-id", "7"), 3, "exists already"),
    (("convert", "{lm}", "{new}", "--label-token", "nope"), 3, "not one token"),
    (("convert", "{lm}", "{new}", "--label-token", "no", "--label-id", "7"), 2, "not both"),
])  # fmt: skip
def test_refusals_end_in_one_line_and_a_status(
    causal: Path, classifier: Path, tmp_path: Path, arguments: Any, status: int, text: str
) -> None:
    places = {"lm": causal, "cls": classifier, "new": tmp_path / "new"}
    found = headswap(*(str(a).format(**places) for a in arguments))
    assert found.returncode == status, found.stderr
    assert text in found.stderr
    assert "Traceback" not in found.stderr
    assert not (tmp_path / "new").exists()


def test_verify_reports_a_stored_classifier(tmp_path: Path) -> None:
    tiny("bert", SEQ, num_labels=2).save_pretrained(tmp_path)
    found = headswap("verify", tmp_path)
    assert found.returncode == 0
    assert "pairs, padded left" in found.stdout
    assert "BertForSequenceClassification" in found.stderr


# -- the demo's parts -----------------------------------------------------------------------------


def test_missing_weights_give_the_exact_command() -> None:
    with pytest.raises(CheckpointError) as caught:
        locate(Weights("no-such==1", "no_such_module", "a.bin", "0"))
    assert INSTALL in str(caught.value)


def test_weights_that_are_others_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "wrong_weights").mkdir()
    (tmp_path / "wrong_weights" / "__init__.py").touch()
    (tmp_path / "wrong_weights" / "a.bin").write_bytes(b"other")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CheckpointError, match="sha256"):
        locate(Weights("wrong==1", "wrong_weights", "a.bin", "0"))


def test_a_cached_folder_is_made_once_and_again_when_it_was_changed(tmp_path: Path) -> None:
    made = []

    def make(folder: Path) -> None:
        made.append(folder)
        folder.mkdir()
        (folder / "a.txt").write_text("right")

    target = tmp_path / "deep" / "kept"
    for _ in range(2):
        assert cached(target, make) == target
    assert len(made) == 1
    (target / "a.txt").write_text("wrong")
    cached(target, make)
    assert (target / "a.txt").read_text() == "right"
    assert len(made) == 2


def test_an_interrupted_cache_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(tmp_path / "kept", fail)
    assert list(tmp_path.iterdir()) == []


def test_the_demos_sentences_are_labelled_and_balanced() -> None:
    sentences = read_sentences()
    assert {label for label, _ in sentences} == set(LABELS)
    for part in (sentences[:SHOWN], sentences[SHOWN:]):
        assert sum(label == "positive" for label, _ in part) * 2 == len(part)
    assert len({text for _, text in sentences}) == len(sentences)
