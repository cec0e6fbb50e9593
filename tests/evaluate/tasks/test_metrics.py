"""LongBench's metrics against what upstream's own `eval.py` gives for the same predictions (recorded)."""

from __future__ import annotations

import sys

import pytest

from rpe3d.config import ConfigError
from rpe3d.evaluate.tasks import longbench, metrics
from rpe3d.evaluate.tasks.rouge import DEPTH, rouge_l

CLASSES = {
    "trec": ["Entity", "Other entity", "Location", "Other location", "City"],
    "lsht": ["体育", "经济", "体育新闻"],
}
# task: (score by THUDM/LongBench at 2e00731 with rouge 1.0.1, fuzzywuzzy 0.18.0, jieba 0.42.1; predictions and answers)
RECORDED = {
    "narrativeqa": (
        45.0,
        [
            ("The Cat, a dog!", ["cat dog", "a bird"]),
            ("", ["x"]),
            ("Ünïcode — naïve", ["naïve ünïcode"]),
            ("the", ["the"]),
        ],
    ),
    "gov_report": (
        13.33,
        [
            ("One cat sat. It sat on a mat.", ["A cat sat on the mat. It slept."]),
            ("", ["x"]),
            (".", ["x."]),
            (" ", ["a b"]),
            ("no stop " * 600, ["no stop " * 500]),
        ],
    ),
    "trec": (
        62.5,
        [
            ("\n\nOther entity\nLocation", ["Other entity"]),
            ("Location City", ["City"]),
            ("Other location", ["Other location"]),
            ("nothing", ["City"]),
        ],
    ),
    "triviaqa": (
        50.0,
        [("\nParis\nPassage:", ["Paris", "City of Light"]), ("It is Paris", ["paris"]), ("\n\n", ["x"])],
    ),
    "samsum": (40.0, [("\nAmy naps.\nDialogue:", ["Amy naps now."]), ("", ["a"])]),
    "lsht": (25.0, [("体育新闻", ["体育"]), ("经济", ["体育"])]),
    "passage_count": (16.67, [("There are 12, not 13.", ["12"]), ("twelve", ["12"]), ("012", ["12"])]),
    "passage_retrieval_en": (
        50.0,
        [("Paragraph 7", ["Paragraph 7"]), ("7 or 8", ["Paragraph 8"]), ("", ["Paragraph 1"])],
    ),
    "passage_retrieval_zh": (50.0, [("段落3", ["段落3"]), ("３", ["段落3"]), ("3、4", ["段落4"])]),
    "lcc": (
        57.8,
        [
            ("\n# note\n```\nreturn x\n", ["return x"]),
            ("\n\n\n", ["return x"]),
            ("// only", ["x = 1"]),
            ("    return  y;", ["    return x;"]),
            ("", [""]),
        ],
    ),
    "repobench-p": (75.0, [("import os\nimport sys", ["import os"]), ("import re", ["from os import path"])]),
    "multifieldqa_zh": (48.89, [("北京天安门。", ["天安门在北京"]), ("《红楼梦》", ["红楼梦"]), ("", ["北京"])]),
    "dureader": (21.43, [("今天天气不错，我们去北京。", ["今天天气很好。我们去天安门"]), ("", ["今天"])]),
    "vcsum": (30.0, [("会议讨论了经济问题. 然后结束", ["会议讨论经济"]), ("word", ["会议"])]),
}


@pytest.mark.parametrize("task", RECORDED)
def test_a_score_is_upstreams(task):
    expected, pairs = RECORDED[task]
    if longbench.TASKS[task].metric.endswith("_zh"):
        pytest.importorskip("jieba", reason="Chinese words need jieba")
    records = [{"pred": said, "answers": gold, "all_classes": CLASSES.get(task)} for said, gold in pairs]
    score = longbench.score(task, records)
    assert (score.score, score.n) == (expected, len(pairs))


def test_every_metric_is_recorded():
    assert {longbench.TASKS[task].metric for task in RECORDED} == {t.metric for t in longbench.TASKS.values()}


def test_rouge_gives_up_where_the_package_does():
    """Its recursion takes 991 calls in LongBench's script, found by trying: 989 words against 2 here, and no more."""
    gold = "w0 zz"
    assert rouge_l(" ".join(f"w{i}" for i in range(DEPTH - 2)), gold) > 0
    assert rouge_l(" ".join(f"w{i}" for i in range(DEPTH - 1)), gold) == 0


def test_code_similarity_is_difflibs():
    """What fuzzywuzzy gives without python-Levenshtein, by whose edit distance these are 56 % alike."""
    assert metrics.code_similarity("return self.total / self.count", "self.count = self.total + 1") == 0.53


def test_chinese_without_jieba_is_refused_not_guessed(monkeypatch):
    metrics._jieba.cache_clear()
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(ConfigError, match=r"needs jieba: pip install 'rpe3d\[eval\]'"):
        metrics.qa_f1_zh("北京", "北京")


def test_jiebas_cache_in_the_temporary_folder_is_not_read(tmp_path, monkeypatch):
    """Anybody may write there, and jieba would load it as marshalled code data."""
    pytest.importorskip("jieba", reason="Chinese words need jieba")
    metrics._jieba.cache_clear()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert metrics.chinese_words("北京天安门") == ["北京", "天安门"]
    assert not list(tmp_path.iterdir())
