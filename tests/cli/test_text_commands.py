# SPDX-License-Identifier: Apache-2.0
"""The commands that run texts answer as the classes in Python do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import headswap
from tiny_models import tiny, word_tokenizer

from headswap.text import Classifier, Embedder, Reranker, RewardModel

SEQ = "AutoModelForSequenceClassification"
TEXTS = ["w1 w2", "w3", "w4 w5 w6"]
CHATS = [[{"role": "user", "content": "w1 w2"}], [{"role": "user", "content": "w3"}]]
LONG = " ".join(f"w{i}" for i in range(30))


def checkpoint(folder: Path, labels: int, auto: str = SEQ) -> Path:
    more = {"num_labels": labels} if auto == SEQ else {}
    tiny("qwen3", auto, **more).save_pretrained(folder)
    own = word_tokenizer()
    own.chat_template = "{% for m in messages %}{{ m.content }} good {% endfor %}"
    own.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("three"), 3)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("one"), 1)


def answers(*arguments: Any, stdin: str = "") -> list[Any]:
    found = headswap(*arguments, "--json", stdin=stdin)
    assert found.returncode == 0, found.stderr
    return [json.loads(line) for line in found.stdout.splitlines()]


def test_classify_calibrates_and_keeps_the_best_labels(three: Path) -> None:
    given = answers("classify", three, *TEXTS, "--mean", 0.5, "--sigma", 2, "--temperature", 0.25,
                    "--activation", "sigmoid", "--top-k", 2)  # fmt: skip
    calibration = {"mean": 0.5, "sigma": 2.0, "temperature": 0.25}
    made = Classifier(three, calibration=calibration, activation="sigmoid")
    wanted = made.classify(TEXTS, top_k=2)
    for found, answer in zip(given, wanted, strict=True):
        assert found["scores"] == pytest.approx(answer.scores, abs=1e-6)
        assert len(found["scores"]) == 2
        assert found["logits"] == pytest.approx(answer.logits, abs=1e-6)


def test_raw_gives_the_logits_themselves(three: Path, one: Path) -> None:
    lines = "\n".join(map(json.dumps, [{"text": text} for text in TEXTS]))
    given = answers("classify", three, "--raw", "--jsonl", stdin=lines)
    assert [found["text"] for found in given] == TEXTS
    wanted = [answer.logits for answer in Classifier(three).classify(TEXTS)]
    for found, logits in zip(given, wanted, strict=True):
        assert list(found["scores"].values()) == pytest.approx(logits, abs=1e-6)
    hits = answers("rerank", one, "w9", *TEXTS, "--raw", "--template", "{query} good {document}")
    made = Reranker(one, template="{query} good {document}")
    ranked = made.rank("w9", TEXTS, activation="identity", calibration={})
    assert [hit["index"] for hit in hits] == [hit.index for hit in ranked]
    assert [hit["score"] for hit in hits] == pytest.approx([h.score for h in ranked], abs=1e-6)
    assert [hit["score"] for hit in hits] == [hit["logit"] for hit in hits]


def test_rerank_has_budgets_a_side_and_families_by_name(one: Path) -> None:
    template = "{query} good {document} yes"
    hits = answers("rerank", one, LONG, LONG, "w2", "--template", template, "--max-query-tokens", 4,
                   "--max-document-tokens", 6, "--cut", "left", "--sigma", 0.5)  # fmt: skip
    made = Reranker(one, template=template, max_query_tokens=4, max_document_tokens=6,
                    truncation="left", calibration={"sigma": 0.5})  # fmt: skip
    with pytest.warns(UserWarning, match="2 of 2 texts were cut"):
        wanted = made.rank(LONG, [LONG, "w2"])
    assert [hit["tokens"] for hit in hits] == [hit.tokens for hit in wanted]
    assert [hit["score"] for hit in hits] == pytest.approx([h.score for h in wanted], abs=1e-6)
    named = answers("rerank", one, "w1", "w2", "--template", "Qwen3-Reranker")
    assert named[0]["score"] == pytest.approx(
        Reranker(one, template="Qwen3-Reranker").score("w1", "w2")[0], abs=1e-6
    )


def test_embed_takes_a_prompt_and_a_side(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 0, "AutoModel")
    (found,) = answers("embed", folder, LONG, "--prompt", "w9 ", "--max-length", 8, "--cut", "left")
    with pytest.warns(UserWarning, match="were cut"):
        wanted = Embedder(folder, max_length=8, truncation="left").embed(LONG, prompt="w9 ")
    assert found["embedding"] == pytest.approx(wanted[0].tolist(), abs=1e-6)
    with pytest.warns(UserWarning, match="were cut"):
        right = Embedder(folder, max_length=8).embed(LONG, prompt="w9 ")
    assert found["embedding"] != pytest.approx(right[0].tolist(), abs=1e-3)


def test_reward_rates_conversations_in_json_lines(one: Path, three: Path, tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps(CHATS[0]) + "\n" + json.dumps({"messages": CHATS[1]}) + "\n")
    wanted = RewardModel(one).reward(CHATS)
    given = answers("reward", one, "--file", file)
    assert [found["messages"] for found in given] == CHATS
    assert [found["reward"] for found in given] == pytest.approx(wanted, abs=1e-6)
    plain = headswap("reward", one, stdin=file.read_text())
    assert list(map(float, plain.stdout.split())) == pytest.approx(wanted, abs=1e-4)
    for arguments, stdin, text in (
        (("reward", one), "w1 w2\n", "standard input:1: not a JSON value"),
        (("reward", one), '{"text": "w1"}\n', "expected a list of messages"),
        (("reward", three), json.dumps(CHATS[0]), "one label; this one has 3"),
    ):
        found = headswap(*arguments, stdin=stdin)
        assert (found.returncode, text in found.stderr) == (3, True), found.stderr


@pytest.mark.parametrize(("more", "text"), [
    (("--raw", "--mean", "1"), "--raw means no calibration"),
    (("--raw", "--activation", "sigmoid"), "--raw means no calibration"),
    (("--cut", "left", "--no-truncation"), "not both"),
])  # fmt: skip
def test_options_that_contradict_each_other_are_refused(more: Any, text: str, three: Path) -> None:
    found = headswap("classify", three, "w1", *more)
    assert found.returncode == 2
    assert text in " ".join(found.stderr.replace("│", " ").split())


def test_what_the_library_refuses_ends_in_its_own_words(three: Path) -> None:
    for more, text in ((("--sigma", "0"), "sigma=0"), (("--cut", "middle"), "'left'")):
        found = headswap("classify", three, "w1", *more)
        assert (found.returncode, text in found.stderr) == (3, True), found.stderr


def test_an_answer_is_one_line_of_utf8_whatever_the_text_and_the_locale(
    three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = '{"text": "w1\\nw2\\r\\tw3"}\n{"text": "é"}\n'.encode()
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    code = "from headswap.cli import main; main()"
    for more in ((), ("--json",)):
        found = subprocess.run(
            [sys.executable, "-c", code, "classify", str(three), "--jsonl", *more],
            input=lines, capture_output=True, check=False,
        )  # fmt: skip
        assert found.returncode == 0, found.stderr
        rows = found.stdout.decode("utf-8").split("\n")
        assert len(rows) == 3
        assert "é" in rows[1]
        assert more or rows[0].endswith("\tw1 w2  w3")
