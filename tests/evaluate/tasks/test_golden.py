"""Published predictions give their published scores, perfect answers 100 and empty ones 0, on the benchmarks' data."""

from __future__ import annotations

import json

import pytest

from rpe3d.evaluate.tasks import leval, longbench, suite
from rpe3d.evaluate.tasks.predictions import read_records
from rpe3d.evaluate.tasks.questions import load

LONGBENCH = "golden/longbench_pred_longalpaca-7b-16k"
LEVAL = "golden/leval_pred"


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
