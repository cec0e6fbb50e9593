"""ROUGE-L as the package `rouge` 1.0 computes it (its `rouge-l` f, on summaries), to the digit.

LongBench's scores were made with that package. It splits at full stops, counts distinct words, and fails on sentences
that are too long for its recursion; LongBench scores those failures as 0, and so do we.
"""

from __future__ import annotations

DEPTH = 991
"""Depth that its recursion can reach in LongBench's own script (Python's limit of 1000, less the frames around it)."""


def rouge_l(prediction: str, reference: str, depth: int = DEPTH) -> float:
    """Return F1 of the words in the union of longest common subsequences by sentence; 0 if `rouge` raises."""
    said, gold = _sentences(prediction), _sentences(reference)
    if not said or not gold:
        return 0.0
    union: set[str] = set()
    for sentence in gold:
        for other in said:
            common = _common(sentence, other, depth)
            if common is None:
                return 0.0
            union |= common
    precision = len(union) / len({word for sentence in said for word in sentence})
    recall = len(union) / len({word for sentence in gold for word in sentence})
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def _sentences(text: str) -> list[list[str]]:
    """Split a text into the words between full stops. A sentence of only white space has one word, the empty one."""
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _common(first: list[str], second: list[str], depth: int) -> set[str] | None:
    """Return the longest common subsequence that `rouge` walks to; None if its recursion is too deep.

    Row i of the table of lengths is kept as bits: j is 0 where the length grows from second[:j] to second[:j + 1]
    (Hyyrö 2004). That also decides each step back: up where it grows, else left.
    """
    places: dict[str, int] = {}
    for j, word in enumerate(second):
        places[word] = places.get(word, 0) | 1 << j
    row = (1 << len(second)) - 1
    rows = []
    for word in first:
        matches = row & places.get(word, 0)
        row = (row + matches) | (row - matches)
        rows.append(row)
    words = set()
    i, j = len(first), len(second)
    calls = 1
    while i and j:
        calls += 1
        if first[i - 1] == second[j - 1]:
            words.add(first[i - 1])
            i, j = i - 1, j - 1
        elif rows[i - 1] >> (j - 1) & 1:
            j -= 1
        else:
            i -= 1
    return words if calls <= depth else None
