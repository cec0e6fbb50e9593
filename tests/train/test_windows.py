"""Windows of text: what is in them, that none is lost or doubled, and that a place leads back to what followed."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import pytest

from rpe3d.config import ConfigError
from rpe3d.train import corpus as corpus_module
from rpe3d.train.corpus import open_corpus
from rpe3d.train.samples import shuffled
from rpe3d.train.windows import Windows

GIVEN = {"mix": 3, "seed": 0, "field": "text", "place": {}}


@pytest.fixture
def corpus(texts, monkeypatch):
    monkeypatch.setattr(corpus_module, "PIECE", 100)
    return open_corpus([str(texts)])


def words(texts):
    return {path.read_text() for path in texts.iterdir()}


def test_a_window_is_of_one_document_and_every_whole_window_of_an_epoch_comes_once(corpus, tokenizer, texts):
    made = Windows(corpus, tokenizer, length=51, pack=False, **GIVEN | {"mix": 1})
    expected = Counter(text[i : i + 50] for text in words(texts) for i in range(0, len(text) // 50 * 50, 50))
    samples = list(islice(made, sum(expected.values())))
    assert all(len(sample.ids) == 51 and sample.ids[0] == 0 for sample in samples)
    assert Counter(tokenizer.decode(sample.ids[1:]) for sample in samples) == expected


def test_packed_windows_are_the_documents_joined_by_the_end_of_text(corpus, tokenizer, texts):
    one = Windows(corpus, tokenizer, length=64, pack=True, **GIVEN | {"mix": 1})
    total = sum(len(text) + 2 for text in words(texts))
    ids = [token for sample in islice(one, total // 64) for token in sample.ids]
    order = [sorted(texts.iterdir())[i].read_text() for i in shuffled(5, 0, 0)]
    joined = [token for text in order for token in [0, *tokenizer(text, add_special_tokens=False).input_ids, 0]]
    assert ids == joined[: len(ids)]


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("mix", [1, 3, 5])
def test_every_place_leads_to_what_followed_it(corpus, tokenizer, pack, mix):
    """Through two epochs: what a checkpoint holds is enough to go on."""
    given = {"length": 90, "pack": pack, **GIVEN, "mix": mix}
    samples = list(islice(Windows(corpus, tokenizer, **given), 70))
    assert samples[-1].after["epoch"] >= 1
    for at in range(0, 60, 3):
        place = json.loads(json.dumps(samples[at].after))
        again = list(islice(Windows(corpus, tokenizer, **given | {"place": place}), 6))
        assert [s.ids for s in again] == [s.ids for s in samples[at + 1 : at + 7]]
        assert [s.after for s in again] == [s.after for s in samples[at + 1 : at + 7]]


def test_documents_are_read_in_turn(corpus, tokenizer):
    names = [s.name.split(",")[0] for s in islice(Windows(corpus, tokenizer, length=51, pack=False, **GIVEN), 6)]
    assert len(set(names[:3])) == 3
    assert names[:3] == names[3:]


def test_the_next_epoch_has_another_order():
    assert shuffled(20, 0, 0) != shuffled(20, 0, 1)
    assert sorted(shuffled(20, 3, 1)) == list(range(20))


def test_documents_shorter_than_a_window_are_refused_unless_joined(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("short")
    corpus = open_corpus([str(tmp_path)])
    with pytest.raises(ConfigError, match="no document is as long as a window of 63 tokens"):
        next(iter(Windows(corpus, tokenizer, length=64, pack=False, **GIVEN)))
    sample = next(iter(Windows(corpus, tokenizer, length=64, pack=True, **GIVEN)))
    assert tokenizer.decode(sample.ids).startswith("<s>short<s><s>short<s>")


def test_empty_documents_end_in_words_not_in_a_loop(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": ""}\n')
    corpus = open_corpus([str(tmp_path)])
    for pack in (False, True):
        with pytest.raises(ConfigError, match="no document is as long"):
            next(iter(Windows(corpus, tokenizer, length=64, pack=pack, **GIVEN)))


def test_packing_needs_an_end_of_text_token(corpus):
    import tiny_lm

    with pytest.raises(ConfigError, match="no end-of-text token"):
        Windows(corpus, tiny_lm.tokenizer(), length=64, pack=True, **GIVEN)
