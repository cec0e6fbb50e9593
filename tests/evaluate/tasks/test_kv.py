"""Key-value retrieval: upstream's prompts to the byte and scores to the digit, and prompts that fit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

import tiny_lm
from rpe3d.config import ConfigError
from rpe3d.evaluate.tasks import kv
from rpe3d.evaluate.tasks.chat import Chat
from rpe3d.evaluate.tasks.questions import find

GOLDEN = json.loads((Path(__file__).parent / "golden" / "kv.json").read_text(encoding="utf-8"))["tasks"]["fill"]
# sha256 of the first ten prompts of upstream's files, by nelson-liu/lost-in-the-middle at 29b8a6d
# (get_kv_retrieval_prompt), the key at each of five places twice.
FILES = {"75_keys": "9ab96a59afcb8a6c", "140_keys": "559f640a75fb4963"}


def digest(samples):
    return hashlib.sha256("\0".join(sample.prompts[0] for sample in samples).encode()).hexdigest()[:16]


@pytest.fixture
def plain():
    return Chat(tokenizer=tiny_lm.tokenizer(bos=True), form="none")


def test_prompts_are_upstreams_to_the_byte(plain):
    records = [
        {
            "ordered_kv_records": [[f"k{i}", f"v{i}{{x}}"] for i in range(9)],
            "key": f"k{asked}",
            "value": f"v{asked}{{x}}",
        }
        for asked in (3, 0, 8, 4, 7)
    ]
    assert digest(kv.samples("75_keys", records, plain, 8192)) == "470ed979dc043254"


@pytest.mark.parametrize("task", FILES)
def test_prompts_of_upstreams_files_are_its_own_to_the_byte(benchmarks, plain, task):
    data = find(("kv", task), benchmarks, None)
    if data is None:
        pytest.skip(f"RPE3D_DATA has no kv/kv-retrieval-{task}.jsonl.gz of nelson-liu/lost-in-the-middle")
    assert digest(kv.samples(task, data.records, plain, 65536, 10)) == FILES[task]


def test_the_slice_scores_what_upstreams_script_gives():
    for one in GOLDEN["records"]:
        assert kv.score("fill", [one]).score == one["score"], one
    assert kv.score("fill", GOLDEN["records"]).score == GOLDEN["score"]


@pytest.mark.parametrize("length", [700, 2048, 16384])
def test_prompts_fill_their_length_and_the_key_goes_through_five_places(plain, length):
    samples = kv.samples("fill", None, plain, length, 5)
    for place, sample in enumerate(samples):
        text = sample.prompts[0]
        tokens = len(plain.encode(text)) + sample.max_new
        assert length - 200 < tokens <= length  # a pair has 80 letters
        keys = [line[2:38] for line in text.split("\n") if '": "' in line]
        assert len(keys) == len(set(keys)) == sample.gold["keys"]
        assert keys.index(sample.gold["key"]) == place * (len(keys) - 1) // 4
        assert f'"{sample.gold["key"]}": "{sample.gold["value"]}"' in text
    assert [sample.gold["depth"] for sample in samples] == [0, 25, 50, 75, 100]


def test_places_of_140_keys_are_those_of_upstreams_experiments(plain):
    texts = [sample.prompts[0].split("\n") for sample in kv.samples("140_keys", None, plain, 16384, 5)]
    wanted = [next(line for line in text if line.startswith("Key: "))[6:42] for text in texts]
    places = [
        [line[2:38] for line in text if '": "' in line].index(key) for text, key in zip(texts, wanted, strict=True)
    ]
    assert places == [0, 34, 69, 104, 139]


def test_a_seed_makes_the_same_records_and_another_seed_others(plain):
    first, again, other = (digest(kv.samples("fill", None, plain, 1024, 3, seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_right_answers_score_100_and_each_place_has_its_own_score(plain):
    samples = kv.samples("fill", None, plain, 1024, 10)
    said = ["" if sample.gold["depth"] == 50 else sample.gold["value"] for sample in samples]
    found = kv.score("fill", [kv.record(sample, [text]) for sample, text in zip(samples, said, strict=True)])
    assert (found.score, found.n, found.empty) == (80.0, 10, 2)
    assert found.parts == {"depth": {str(depth): (0.0 if depth == 50 else 100.0, 2) for depth in (0, 25, 50, 75, 100)}}


def test_what_does_not_fit_or_is_no_record_is_refused(plain):
    with pytest.raises(ConfigError, match="75 keys do not fit into 2048 tokens"):
        kv.samples("75_keys", None, plain, 2048, 1)
    with pytest.raises(ConfigError, match="does not fit into 256 tokens"):
        kv.samples("fill", None, plain, 256, 1)
    record = {"ordered_kv_records": [["a", "1"], ["b", "2"]], "key": "a", "value": "2"}
    with pytest.raises(ConfigError, match="record 1 does not hold the pair that it asks for"):
        kv.samples("fill", [record], plain, 2048)
    with pytest.raises(ConfigError, match="record 1 has no field 'ordered_kv_records'"):
        kv.samples("fill", [{"key": "k"}], plain, 2048)
    with pytest.raises(ConfigError, match="record 1 has no field 'value'"):
        kv.score("fill", [{"model_answer": "x"}])
