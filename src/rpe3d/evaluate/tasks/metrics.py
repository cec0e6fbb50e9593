"""LongBench's metrics of one prediction against one reference, to the digit, whatever other packages are installed.

If upstream's result depends on the machine (fuzzywuzzy with or without python-Levenshtein), these are the published
numbers. Only Chinese words need a package, jieba, and are refused without it.
"""

from __future__ import annotations

import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from functools import cache
from typing import Any

from rpe3d.config import ConfigError
from rpe3d.evaluate.tasks.rouge import DEPTH, rouge_l

Metric = Callable[[str, str, Sequence[str]], float]
"""Function of a prediction, a reference and the names of all classes, with values in [0, 1]."""

# As upstream has it, gaps included: it takes 《 for a letter.
CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』"
    "【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
PUNCTUATION = frozenset(string.punctuation)
ALL_PUNCTUATION = frozenset(string.punctuation + CHINESE_PUNCTUATION)


def normalized(text: str) -> str:
    """Drop punctuation, articles and superfluous white space (SQuAD's normalisation, but case is kept)."""
    bare = "".join(letter for letter in text if letter not in PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def qa_f1(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return F1 of the bags of words, in lower case."""
    return _f1(normalized(prediction.lower()).split(), normalized(reference.lower()).split())


def qa_f1_zh(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return F1 of the bags of Chinese words."""
    return _f1(*([bare for word in chinese_words(text) if (bare := _bare(word))] for text in (prediction, reference)))


def rouge(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return ROUGE-L, as `rouge_l` computes it."""
    return rouge_l(prediction, reference)


def rouge_zh(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return ROUGE-L of Chinese words. Upstream calls it through one more function, so `rouge` has one call less."""
    return rouge_l(" ".join(chinese_words(prediction)), " ".join(chinese_words(reference)), DEPTH - 1)


def classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """Return one over the number of class names in the prediction, if the right one is among them.

    Names that are part of the right one are dropped, but upstream drops them from the list that it iterates over, so
    that the name after a dropped one is skipped: we keep this, since the scores depend on it.
    """
    named = [name for name in classes if name in prediction]
    for name in named:
        if name in reference and name != reference:
            named.remove(name)
    return 1.0 / len(named) if reference in named else 0.0


def count(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return the share of the numbers in the prediction that equal the right one."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(str(reference)) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Apply `count` to the paragraph's number."""
    return count(prediction, _paragraph(r"Paragraph (\d+)", reference))


def retrieval_zh(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Apply `count` to the Chinese paragraph's number."""
    return count(prediction, _paragraph(r"段落(\d+)", reference))


def code_similarity(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return the similarity of the first line without "`", "#" or "//", even if it is blank, in whole percent.

    This is fuzzywuzzy's `ratio` without python-Levenshtein; with it LongAlpaca's lcc is 59.82 instead of 57.61.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if line == reference:
        return 1.0
    if not line or not reference:
        return 0.0
    return round(100 * SequenceMatcher(None, line, reference).ratio()) / 100


def chinese_words(text: str) -> list[str]:
    """Split Chinese text into words with jieba."""
    return list(_jieba().cut(text, cut_all=False))


@cache
def _jieba() -> Any:
    """Load jieba with its own dictionary, read from the package: its cache file is in a world-writable place."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python 3.12, and of setuptools, at what jieba was written like
            import jieba
    except ImportError:
        raise ConfigError("scoring Chinese by words needs jieba", "pip install 'rpe3d[eval]'") from None
    cutter = jieba.Tokenizer()
    cutter.FREQ, cutter.total = cutter.gen_pfdict(cutter.get_dict_file())
    cutter.initialized = True
    return cutter


def _bare(word: str) -> str:
    return "".join("".join(letter for letter in word.lower() if letter not in ALL_PUNCTUATION).split())


def _f1(prediction: list[str], reference: list[str]) -> float:
    same = sum((Counter(prediction) & Counter(reference)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(prediction), same / len(reference)
    return (2 * precision * recall) / (precision + recall)


def _paragraph(pattern: str, reference: str) -> str:
    found = re.search(pattern, reference)
    if found is None:
        raise ConfigError(f"{reference!r} names no paragraph", "pass predictions of a retrieval task")
    return found[1]
