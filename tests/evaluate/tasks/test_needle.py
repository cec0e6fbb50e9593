"""Needles at every depth: where they lie, and what share of each depth is found."""

from __future__ import annotations

import pytest

from rpe3d.config import ConfigError
from rpe3d.evaluate.tasks import needle, ruler
from rpe3d.evaluate.tasks.fitting import most, spread

ESSAY = " ".join(f"Sentence {i} is about number {i * i}." for i in range(300))


def test_needles_go_from_the_first_sentence_to_the_last(words):
    samples = needle.samples("number", words, 2048, 11, ESSAY)
    assert [sample.gold["depth"] for sample in samples] == list(range(0, 101, 10))
    for sample in samples:
        text = sample.prompts[0]
        begin, end = text.index("Sentence 0 "), text.rindex("\nWhat is the special")
        place = (text.index("One of the special magic numbers") - begin) / (end - begin)
        assert place == pytest.approx(sample.gold["depth"] / 100, abs=0.03)
        assert len(text.split()) + sample.max_new <= 2048
        assert sample.gold["outputs"][0] in text


def test_but_for_the_depth_samples_are_rulers(words):
    """niah_single_2: the same words around, and its score."""
    (theirs,) = ruler.samples("niah_single_2", words, 2048, 1, ESSAY)
    (ours,) = needle.samples("number", words, 2048, 1, ESSAY)
    assert ours.prompts[0].split("\n")[0] == theirs.prompts[0].split("\n")[0]
    assert sorted(ours.prompts[0].split()) == sorted(theirs.prompts[0].split())  # the needle lies elsewhere, if at all
    assert (ours.max_new, ours.gold["outputs"]) == (theirs.max_new, theirs.gold["outputs"])
    assert ours.gold["depth"] == 50


def test_a_short_context_has_a_haystack_too(words):
    """RULER's haystacks grow by 500 words: where not one step fits, the needle would lie alone at every depth."""
    samples = needle.samples("number", words, 512, 3, ESSAY)
    assert len({sample.prompts[0].split().index("One") for sample in samples}) == 3
    for sample in samples:
        assert 380 < len(sample.prompts[0].split()) + sample.max_new <= 512
    with pytest.raises(ConfigError, match="does not fit into 230 tokens"):
        needle.samples("number", words, 230, 3, ESSAY)


def test_each_depth_has_its_own_score(words):
    samples = needle.samples("number", words, 2048, 22, ESSAY)
    said = [sample.gold["outputs"][0] if sample.gold["depth"] < 50 else "" for sample in samples]
    found = needle.score("number", [needle.record(one, [text]) for one, text in zip(samples, said, strict=True)])
    assert (found.score, found.n, found.metric) == (45.45, 22, "string_match_all")
    assert found.parts == {"depth": {str(d): (100.0 if d < 50 else 0.0, 2) for d in range(0, 101, 10)}}


@pytest.mark.parametrize(
    ("count", "depths", "places"),
    [(1, 11, [0.5]), (2, 11, [0, 1]), (3, 11, [0, 0.5, 1]), (6, 3, [0, 0, 0.5, 0.5, 1, 1]), (4, 3, [0, 0, 0.5, 1])],
)
def test_samples_are_spread_evenly(count, depths, places):
    assert spread(count, depths) == places


@pytest.mark.parametrize("largest", [1, 2, 3, 4, 7, 8, 100, 1000])
@pytest.mark.parametrize("least", [1, 2])
def test_the_most_that_fits_is_found(largest, least):
    assert most(lambda n: n <= largest, least) == (largest if largest >= least else None)
