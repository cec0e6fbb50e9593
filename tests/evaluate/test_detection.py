"""The detection of DPE's scales, against the authors' shell script and against generation without any of its code."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
import torch

import rpe3d
import tiny_lm
from rpe3d.cli import main
from rpe3d.cli.arguments import law as law_given
from rpe3d.evaluate import detection
from rpe3d.evaluate.detection import Trial, base_scale, best, candidates, search
from rpe3d.evaluate.grid import silent
from rpe3d.evaluate.tasks.sample import Sample
from rpe3d.models import facts

pytestmark = pytest.mark.usefixtures("one_thread")

# The arithmetic of run_niah_detect.sh (LuLuLuyi/DPE, 46b85de), with its variables, and what it would run printed.
SCRIPT = """
for detect_num in 1 2 3 4 5 6 7 8; do
    factor=$((T / L * 2))
    length=$T
    while [ $length -ge 1024 ]; do
        group="" separator=""
        for i in 1 2 3 4 5 6 7 8; do
            if [ $i -eq $detect_num ]; then part=$((T / length)); else part=$factor; fi
            group="$group$separator$part" separator="-"
        done
        echo $group
        length=$((length / 2))
    done
done
"""


@pytest.mark.skipif(shutil.which("sh") is None, reason="there is no shell")
@pytest.mark.parametrize(("context", "pretrained"), [(131072, 8192), (32768, 8192), (50000, 8192), (262144, 131072)])
def test_the_scales_that_are_tried_are_those_of_the_authors_script(context, pretrained):
    given = f"T={context}; L={pretrained}\n{SCRIPT}"
    expected = subprocess.run(["sh", "-c", given], capture_output=True, text=True, check=True).stdout.split()
    asked = []
    trials = search(pretrained, context, 8, lambda scales: asked.append("-".join(map(str, scales))) or 0.0)
    assert asked == list(dict.fromkeys(expected))
    assert [trial.scale for trial in trials] == candidates(pretrained, context) * 8
    assert len(trials) == len(expected)


def test_llama_3_is_detected_at_128k_with_all_other_groups_at_32():
    """Their script as it is published: TEST_MAX_LENGTH 131072, PRETRAIN_LENGTH 8192."""
    assert base_scale(8192, 131072) == 32
    assert candidates(8192, 131072) == [1, 2, 4, 8, 16, 32, 64, 128]


def test_a_group_takes_its_best_scale_and_of_equals_the_one_nearest_to_the_others():
    scores = {0: {1: 10, 2: 90, 4: 50, 8: 50}, 1: {1: 50, 2: 50, 4: 0, 8: 50}, 2: {1: 7, 2: 7, 4: 7, 8: 7}}
    trials = [Trial(group=g, scale=s, score=float(x)) for g, row in scores.items() for s, x in row.items()]
    assert best(trials, 4) == (2, 8, 4)


LETTERS = list("abcdefghijklmnopqrstuvwxyz")


@pytest.fixture
def questions(monkeypatch):
    """Texts beyond the 256 positions of a model, and letters as answers: some are said by chance."""
    texts = ["".join(chr(32 + (7 * n * n + n // 5 + k) % 90) for n in range(400)) for k in range(2)]
    made = [Sample(prompts=(text,), max_new=6, gold={"outputs": LETTERS, "length": 406}) for text in texts]
    monkeypatch.setattr(detection, "questions", lambda *_: made)
    return made


def by_hand(model, tokenizer, samples, pairs):
    """The table of scores with nothing but `extend` and `generate`, one text at a time."""
    table = {}
    for group in range(pairs):
        for scale in (1, 2, 4, 8, 16, 32):
            scales = [8] * pairs
            scales[group] = scale
            rpe3d.extend(model, "dpe", context=1024, window=32, scales=scales)
            hits = 0
            for sample in samples:
                ids = torch.tensor([tokenizer(sample.prompts[0]).input_ids])
                out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
                said = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).lower()
                hits += sum(letter in said for letter in LETTERS)
            table[group, scale] = round(100 * hits / (len(LETTERS) * len(samples)), 2)
    rpe3d.restore(model)
    return table


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_lm.save(tmp_path_factory.mktemp("dpe") / "model")


def test_every_score_is_that_of_plain_generation(questions, monkeypatch):
    monkeypatch.setattr(detection, "GROUPS", 2)
    model, tokenizer = tiny_lm.model(), tiny_lm.tokenizer()
    expected = by_hand(model, tokenizer, questions, 2)
    law, trials = detection.detect(model, tokenizer, facts(model), 1024, questions, silent)
    assert {(trial.group, trial.scale): trial.score for trial in trials} == pytest.approx(expected)
    assert len(set(expected.values())) > 2
    top = [max((x, -abs(s.bit_length() - 4), s) for (g, s), x in expected.items() if g == group) for group in range(2)]
    assert law.scales == tuple(scale for *_, scale in top)
    assert rpe3d.law_of(model) is None


def test_tune_writes_a_law_file_that_other_verbs_take(folder, questions, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(detection, "GROUPS", 2)
    out = tmp_path / "dpe.json"
    given = [str(folder), "--context", "1k", "--law", "dpe", "--trials", "2", "--device", "cpu", "--out", str(out)]
    assert main(["tune", *given]) == 0
    said = capsys.readouterr()
    content = json.loads(out.read_text())
    measured = content.pop("measured")
    law = rpe3d.make_law(**content)
    assert (law.name, law.context, law.window, len(law.scales)) == ("dpe", 1024, 32, 2)
    assert (measured["task"], measured["samples"], measured["others"]) == ("ruler:niah_multivalue", 2, 8)
    assert len(measured["trials"]) == 12
    assert f"scales {law.scales[0]}-{law.scales[1]}: the best of each group" in said.out
    spec = law_given(str(out))
    assert (spec.name, spec.pretrained, spec.parameters["scales"]) == ("dpe", 256, list(law.scales))


def test_the_texts_are_rulers_without_a_chat():
    tokenizer = tiny_lm.tokenizer()
    (sample,) = detection.questions(tokenizer, 8000, 1, "A sentence of no use. Another one. " * 300)
    assert sample.prompts[0].startswith("Some special magic numbers are hidden within the following text.")
    assert sample.prompts[0].endswith("mentioned in the provided text are")
    assert len(sample.gold["outputs"]) == 4
    assert 5000 < len(tokenizer(sample.prompts[0]).input_ids) <= 8000 - sample.max_new
