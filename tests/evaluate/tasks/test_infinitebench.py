"""InfiniteBench's retrieval tasks: upstream's prompts to the byte, its published scores to the digit, any length."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

import tiny_lm
from rpe3d.config import ConfigError
from rpe3d.evaluate.tasks import infinitebench
from rpe3d.evaluate.tasks.chat import Chat
from rpe3d.evaluate.tasks.predictions import read_records
from rpe3d.evaluate.tasks.questions import find

GOLDEN = json.loads((Path(__file__).parent / "golden" / "infinitebench.json").read_text(encoding="utf-8"))
# sha256 of prompts by OpenBMB/InfiniteBench at 88b3daa: create_prompt and truncate_by_tokens of two made-up records,
# a short one and one that is cut.
GIVEN = {"passkey": "acbcfb3de2357558", "number_string": "6d2acfd9ffd919d7", "kv_retrieval": "9bb7d2c6ef68c40b"}
# The context, samples and sha256 of prompts and answers by data/construct_synthetic_dataset.py, with 58 lines of grass
# instead of 5220 (30 pairs instead of 2500) and seed 5; pairs are those of `kv.drawn`, not shuffled.
MADE = {
    "passkey": (5468, 590, "c92c72d09209b2ad"),
    "number_string": (5514, 590, "87d20e313a6af4ff"),
    "kv_retrieval": (2637, 20, "250b1a1368b44a74"),
}


def digest(parts):
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@pytest.fixture
def chat():
    """Bytes; the form of chats does not count."""
    return Chat(tokenizer=tiny_lm.tokenizer(bos=True), form="llama2")


@pytest.mark.parametrize("task", infinitebench.TASKS)
def test_prompts_of_given_records_are_upstreams_to_the_byte(chat, task):
    records = [{"context": "ä {word} 中。 " * n, "input": "What?", "answer": ["12345"]} for n in (3, 700)]
    samples = infinitebench.samples(task, records, chat, 4096)
    assert digest([sample.prompts[0] for sample in samples]) == GIVEN[task]
    assert [sample.gold["ground_truth"] for sample in samples] == ["12345"] * 2


@pytest.mark.parametrize("task", infinitebench.TASKS)
def test_made_prompts_are_upstreams_to_the_byte(chat, task):
    length, count, upstream = MADE[task]
    samples = infinitebench.samples(task, None, chat, length, count, seed=5)
    answers = [sample.gold["ground_truth"] for sample in samples]
    assert digest([*(sample.prompts[0] for sample in samples), *answers]) == upstream


@pytest.mark.parametrize("task", infinitebench.TASKS)
def test_the_slice_scores_what_upstreams_script_gives(task):
    given = GOLDEN["tasks"][task]
    for one in given["records"]:
        assert infinitebench.score(task, [one]).score == one["score"], one
    assert infinitebench.score(task, given["records"]).score == given["score"]


def test_published_predictions_score_what_the_readme_says(benchmarks):
    """Seven models on three tasks, from GPT-4 to ChatGLM3."""
    folder = benchmarks / "golden" / "infinitebench"
    if not folder.is_dir():
        pytest.skip("RPE3D_DATA has no golden/infinitebench, the folder results/ of OpenBMB/InfiniteBench")
    for model, published in GOLDEN["published"].items():
        files = {task: folder / model / f"preds_{task}.jsonl" for task in infinitebench.TASKS}
        assert [infinitebench.score(task, read_records(file)).score for task, file in files.items()] == published


@pytest.mark.parametrize("length", [1024, 5000, 20000])
@pytest.mark.parametrize("task", infinitebench.TASKS)
def test_prompts_fill_any_length_and_the_right_answer_scores_100(chat, task, length):
    samples = infinitebench.samples(task, None, chat, length, 4)
    for sample in samples:
        tokens = len(chat.encode(sample.prompts[0])) + sample.max_new
        assert length - 200 < tokens <= length
        assert sample.gold["ground_truth"] in sample.prompts[0]
    found = infinitebench.score(task, [infinitebench.record(one, [one.gold["ground_truth"]]) for one in samples])
    assert (found.score, found.n) == (100.0, 4)
    assert len(found.parts["depth"]) == 4
    assert infinitebench.score(task, [infinitebench.record(one, [""]) for one in samples]).score == 0.0


def test_few_samples_are_spread_from_the_beginning_to_the_end(chat):
    samples = infinitebench.samples("passkey", None, chat, 4096, 3)
    places = [sample.prompts[0].index("Remember it") / len(sample.prompts[0]) for sample in samples]
    assert [sample.gold["depth"] for sample in samples] == [0, 50, 100]
    assert places[0] < 0.1 < 0.4 < places[1] < 0.6 < 0.9 < places[2]


def test_files_come_before_what_is_made_and_lie_in_the_suites_folder(tmp_path, chat):
    assert find(("infinitebench", "passkey"), tmp_path, None) is None
    (tmp_path / "passkey.jsonl").write_text('{"context": "c", "input": "i", "answer": "1"}\n')
    assert find(("infinitebench", "passkey"), tmp_path, None) is None
    (tmp_path / "infinitebench").mkdir()
    (tmp_path / "passkey.jsonl").rename(tmp_path / "infinitebench" / "passkey.jsonl")
    assert find(("infinitebench", "passkey"), tmp_path, None).records[0]["answer"] == "1"
    with pytest.raises(ConfigError, match="there is no folder"):
        find(("infinitebench", "passkey"), tmp_path / "none", None)


@pytest.mark.parametrize("answer", [{}, {"answer": 12345}, {"answer": []}, {"answer": [12345]}, {"answer": None}])
def test_questions_without_an_answer_that_can_be_right_are_refused(chat, answer):
    """The score compares texts: whatever a model says to such a question, it would be wrong."""
    right = {"context": "c", "input": "i", "answer": ["12345"]}
    with pytest.raises(ConfigError, match="record 2 has no answer that is a string"):
        infinitebench.samples("passkey", [right, {"context": "c", "input": "i", **answer}], chat, 4096)


def test_what_does_not_fit_or_is_no_prediction_is_refused(chat):
    with pytest.raises(ConfigError, match="infinitebench:passkey does not fit into 256 tokens"):
        infinitebench.samples("passkey", None, chat, 256, 1)
    with pytest.raises(ConfigError, match="record 1 has no field 'pred'"):
        infinitebench.score("passkey", [{"ground_truth": "1"}])
    with pytest.raises(ConfigError, match="record 1 has no field 'label'"):
        infinitebench.score("passkey", [{"prediction": "1"}])
