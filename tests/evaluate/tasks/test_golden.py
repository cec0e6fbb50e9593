"""Scores to the digit: of a slice of our own beside this file, and of published predictions where their data are.

Upstream's own scripts scored the slice (`source` in its files), each record alone and each task as a whole.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rpe3d.evaluate.tasks import leval, longbench, suite
from rpe3d.evaluate.tasks.predictions import read_records
from rpe3d.evaluate.tasks.questions import load

LONGBENCH = "golden/longbench_pred_longalpaca-7b-16k"
LEVAL = "golden/leval_pred"
SLICE = {
    group: json.loads((Path(__file__).parent / "golden" / f"{group}.json").read_text(encoding="utf-8"))["tasks"]
    for group in ("longbench", "leval")
}
SLICED = [(group, task) for group, tasks in SLICE.items() for task in tasks]


def records_of(group, task):
    """Return the slice's records in the benchmark's own format of predictions."""
    given = SLICE[group][task]
    if group == "longbench":
        return [
            {"pred": x["pred"], "answers": x["answers"], "all_classes": given.get("classes")} for x in given["records"]
        ]
    return [{"gt": x["gt"], "model_pred": x["pred"], "evaluation": "exam"} for x in given["records"]]


def needs(group, task):
    if group == "longbench" and longbench.TASKS[task].metric.endswith("_zh"):
        pytest.importorskip("jieba", reason="Chinese words need jieba")


@pytest.mark.parametrize(("group", "task"), SLICED)
def test_the_slice_scores_what_upstreams_script_gives(group, task):
    needs(group, task)
    records, given = records_of(group, task), SLICE[group][task]
    for one, alone in zip(records, given["records"], strict=True):
        if "score" in alone:  # upstream cannot score a single topic
            assert suite(group).score(task, [one]).score == alone["score"], alone
    score = suite(group).score(task, records)
    assert (score.score, score.n) == (given["score"], len(records))


def test_every_task_is_in_the_slice():
    assert set(SLICE["longbench"]) == set(longbench.TASKS)
    assert set(SLICE["leval"]) == set(leval.TASKS)


RIGHT = {
    "trec": "City",
    "lsht": "经济",
    "passage_count": "12",
    "passage_retrieval_en": "Paragraph 7",
    "passage_retrieval_zh": "段落7",
    "lcc": "    return x;",
    "multifieldqa_zh": "天安门在北京",
    "coursera": "BD",
    "quality": "(B) Their dog",
    "tpo": "A",
    "gsm100": "18",
    "codeU": "[6 15]",
    "sci_fi": "True [fact: False]",
}


@pytest.mark.parametrize(("group", "task"), SLICED)
def test_from_question_to_score_the_right_answer_is_100_and_none_is_0(words, group, task):
    """Through what `rpe3d eval` goes through: samples of a question, the model's words, the record, the score."""
    needs(group, task)
    right = RIGHT.get(task, "Ada wrote it")
    classes = SLICE[group][task].get("classes")
    asked = {
        "longbench": {"context": "C", "input": "Q", "answers": [right], "all_classes": classes},
        "leval": {"input": "D", "instructions": ["Q"] * 3, "outputs": [right] * 3, "evaluation": "exam"},
    }[group]
    samples = suite(group).samples(task, [asked], words, 4096)
    both = right.removesuffix("]").split(" [fact: ") if task == "sci_fi" else [right]
    for answers, expected in ((both, 100.0), ([""] * len(both), 0.0)):
        records = [suite(group).record(sample, answers) for sample in samples]
        assert suite(group).score(task, records).score == expected


def test_longalpacas_predictions_score_what_its_authors_published(benchmarks):
    """dvlab-research/LongLoRA's result.json: also the paper's LongLora-16k row."""
    published = json.loads((benchmarks / LONGBENCH / "result.json").read_text())
    found = {
        task: longbench.score(task, read_records(benchmarks / LONGBENCH / f"{task}.jsonl.xz")).score
        for task in published
    }
    assert found == published


def test_l_evals_predictions_score_what_its_script_gives(benchmarks):
    for model, published in json.loads((benchmarks / LEVAL / "expected.json").read_text()).items():
        found = {
            task: leval.score(task, read_records(benchmarks / LEVAL / model / f"{task}.pred.jsonl.xz")).score
            for task in published
        }
        assert found == published


CASES = [("longbench", task) for task in longbench.DEFAULT]
CASES += [("leval", task) for task in ("coursera", "quality", "tpo", "gsm100", "sci_fi")]


@pytest.mark.parametrize(("group", "task"), CASES)
def test_the_right_answers_score_100_and_none_score_0(benchmarks, words, group, task):
    """Where the right answer is code that upstream passes over (with # or //), a perfect model says it in vain."""
    records = load(group, task, benchmarks).records
    samples = suite(group).samples(task, records, words, 128 * 1024)
    if group == "longbench":
        right = [(sample.gold["answers"][0],) for sample in samples]
    else:
        right = [tuple(sample.gold["gt"].removesuffix("]").split(" [fact: ")) for sample in samples]
    if task in longbench.CODE:
        seen = [not any(mark in said for mark in ("`", "#", "//")) for (said,) in right]
        samples, right = ([x for x, ok in zip(part, seen, strict=True) if ok] for part in (samples, right))
        assert len(right) > len(seen) / 2
    record = suite(group).record
    perfect = [record(sample, said) for sample, said in zip(samples, right, strict=True)]
    empty = [record(sample, [""] * len(sample.prompts)) for sample in samples]
    assert suite(group).score(task, perfect).score == 100.0
    assert suite(group).score(task, empty).score == 0.0
