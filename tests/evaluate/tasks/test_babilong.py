"""BABILong's prompts, mixtures and scores are upstream's, byte for byte and to the digit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

import tiny_lm
from rpe3d.config import ConfigError
from rpe3d.evaluate.tasks import babilong
from rpe3d.evaluate.tasks.babilong_build import Mixer, stories
from rpe3d.evaluate.tasks.chat import Chat
from rpe3d.evaluate.tasks.predictions import read_records
from rpe3d.evaluate.tasks.questions import find

GOLDEN = json.loads((Path(__file__).parent / "golden" / "babilong.json").read_text(encoding="utf-8"))
# sha256 of two prompts by booydar/babilong at 7a6efee, get_formatted_input of babilong/prompts.py.
UPSTREAM = {
    "qa1": "3420be0260881ae1",
    "qa2": "e156167dc8d4de1f",
    "qa3": "6ecc3f5d4c5cc481",
    "qa4": "78eda4e26228f48b",
    "qa5": "280a1bbf80edb5b7",
    "qa6": "d544b9f0f836731d",
    "qa7": "daf680870ca8808f",
    "qa8": "f1e961c93a8ca048",
    "qa9": "68994246a348c470",
    "qa10": "0f09280e72848586",
}
STORIES = "".join(
    f"{i} Ada moved to room {n * i}.\n" if i % 3 else f"{i} Where is Ada? \troom {n * (i - 1)}\t{i - 1}\n"
    for n in range(1, 6)
    for i in range(1, 10)
)
BOOKS = [" ".join(f"Sentence {i} of book {b} is about number {i * i}." for i in range(300)) for b in range(2)]


def digest(parts):
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@pytest.fixture
def plain():
    return Chat(tokenizer=tiny_lm.tokenizer(bos=True), form="none")


@pytest.mark.parametrize("task", babilong.TASKS)
def test_prompts_are_upstreams_to_the_byte(plain, task):
    records = [{"input": f"  ä {{word}} 中。 {n} ", "question": "Where {is} it? ", "target": "x"} for n in (1, 2)]
    assert digest([sample.prompts[0] for sample in babilong.samples(task, records, plain, 4096)]) == UPSTREAM[task]


def test_facts_are_mixed_into_a_text_as_upstream_mixes_them(plain):
    """TaskDataset, SentenceSampler and NoiseInjectionDataset of upstream, seeded, sentences split as here."""
    mixer = Mixer(tokenizer=plain.tokenizer, texts=BOOKS, size=700, seed=42)
    mixed = mixer.mixed(stories(STORIES, "made-up"), 6)
    assert digest([part for one in mixed for part in one.values()]) == "3e080ad2e35838e4"


def test_a_question_has_all_facts_of_its_story_before_it_and_no_other_question():
    first, second, third, fourth, *_ = stories(STORIES, "made-up")
    assert first == {
        "facts": ["Ada moved to room 1.", "Ada moved to room 2."],
        "question": "Where is Ada? ",
        "target": "room 2",
    }
    assert second["facts"] == [*first["facts"], "Ada moved to room 4.", "Ada moved to room 5."]
    assert stories(STORIES.replace("\n", "\r\n"), "made-up") == stories(STORIES, "made-up")
    assert (len(third["facts"]), fourth["facts"]) == (6, ["Ada moved to room 2.", "Ada moved to room 4."])


@pytest.mark.parametrize("task", babilong.TASKS)
def test_the_slice_scores_what_upstreams_script_gives(task):
    given = GOLDEN["tasks"][task]
    for one in given["records"]:
        assert babilong.score(task, [one]).score == one["score"], one
    assert babilong.score(task, given["records"]).score == given["score"]


def test_published_predictions_score_what_upstreams_script_gives(benchmarks):
    """145 files of Phi-3-mini and Gemini 3 Flash: qa1 to qa5, from no text to 1M tokens."""
    folder = benchmarks / "golden" / "babilong_evals"
    if not folder.is_dir():
        pytest.skip("RPE3D_DATA has no golden/babilong_evals, the folder of that name of booydar/babilong")
    for name, scores in GOLDEN["published"].items():
        found = {
            place: babilong.score(place.split("_")[0], read_records(folder / name.replace("*", place))).score
            for place in scores
        }
        assert found == scores


def test_an_answer_that_pandas_takes_for_missing_is_empty_in_a_csv_alone(tmp_path):
    """Upstream reads its CSV with pandas, for which the text None is no text."""
    file = tmp_path / "qa6.csv"
    file.write_text(',target,output,question\n0,no,None,"Is it, ""here""?"\n1,no,no,Is it?\n', encoding="utf-8")
    records = read_records(file)
    assert [one["output"] for one in records] == ["", "no"]
    assert records[0]["question"] == 'Is it, "here"?'
    assert babilong.score("qa6", records).score == 50.0
    assert babilong.score("qa6", [{"target": "no", "output": "None", "question": "Is it?"}]).score == 100.0


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "is empty"),
        (b"target,output\n", "is empty"),
        (b"target,output\nno,yes,maybe\n", "row 1 of .* has more cells than columns"),
        (b'target,output\nno,"yes\n', "is not a CSV file"),
        (b"target,output\nno,\xff\n", "is not a CSV file"),
    ],
)
def test_what_is_not_csv_is_refused(tmp_path, raw, problem):
    (tmp_path / "a.csv").write_bytes(raw)
    with pytest.raises(ConfigError, match=problem):
        read_records(tmp_path / "a.csv")


@pytest.mark.parametrize(("length", "most"), [(1024, 700), (4096, 3700), (131072, 127700)])
def test_lengths_are_upstreams(length, most):
    """data/create_tasks.py: 300 tokens less than 1000 a k."""
    assert babilong.largest(length) == most


def test_made_prompts_fit_their_length_and_hold_their_facts(plain):
    questions = stories(STORIES, "made-up")
    for sample in babilong.samples("qa1", questions, plain, 4096, 5, seed=3, texts=BOOKS):
        assert len(plain.encode(sample.prompts[0])) + sample.max_new <= 4096
        assert f"Ada moved to {sample.gold['target']}." in sample.prompts[0]
    with pytest.raises(ConfigError, match="BABILong has no room in a context of 512"):
        babilong.samples("qa1", questions, plain, 512, 5, seed=3, texts=BOOKS)


def test_a_text_without_sentences_is_refused(plain):
    with pytest.raises(ConfigError, match="hardly any sentence"):
        babilong.samples("qa1", stories(STORIES, "made-up"), plain, 4096, 1, texts=["word " * 9000])


def test_questions_are_upstreams_files_by_length_or_babis(tmp_path, plain):
    place = tmp_path / "babilong"
    (place / "qa1").mkdir(parents=True)
    (place / "qa2_two-supporting-facts_test.txt").write_text(STORIES, encoding="utf-8")
    record = {"input": "Ada is in the office.", "question": "Where is Ada? ", "target": "office"}
    (place / "qa1" / "4k.json").write_text(json.dumps([record]), encoding="utf-8")
    found = find(("babilong", "qa1"), tmp_path, [4096, 8192])
    assert {length: data.records for length, data in found.at.items()} == {4096: [record]}
    assert len(find(("babilong", "qa2"), tmp_path, None).records) == 15
    for task, lengths, problem in (
        ("qa1", None, "BABILong has a file for each length"),
        ("qa1", [2048], "there is no .*2k.json"),
        ("qa3", [4096], "has no questions of babilong:qa3"),
    ):
        with pytest.raises(ConfigError, match=problem):
            find(("babilong", task), tmp_path, lengths)
    with pytest.raises(ConfigError, match="--data is not given"):
        find(("babilong", "qa1"), None, [4096])


@pytest.mark.parametrize(
    ("text", "problem"),
    [("Ada moved.\n", "line 1 of x is not a line of bAbI"), ("1 Ada moved.\n", "x has no questions")],
)
def test_what_is_not_babi_is_refused(text, problem):
    with pytest.raises(ConfigError, match=problem):
        stories(text, "x")


def test_a_story_that_is_longer_than_the_context_is_refused(plain):
    """Upstream counts eight tokens a fact, and a tokenizer of bytes needs more than twenty."""
    mixer = Mixer(tokenizer=plain.tokenizer, texts=BOOKS, size=60, seed=0)
    with pytest.raises(ConfigError, match=r"a story of \d facts does not fit into 60 tokens"):
        mixer.mixed(stories(STORIES, "made-up"), 15)
