"""What LongBench's metrics do at their limits and without packages; what they score is in `test_golden`."""

from __future__ import annotations

import sys

import pytest

from rpe3d.config import ConfigError
from rpe3d.evaluate.tasks import metrics
from rpe3d.evaluate.tasks.rouge import DEPTH, rouge_l


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
