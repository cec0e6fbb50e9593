"""An evaluation: nothing is done twice, nothing is lost, and the model is left as it was."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import rpe3d
from rpe3d.config import ConfigError
from rpe3d.evaluate import Text, perplexity, tokenize
from rpe3d.evaluate.evaluation import evaluate
from rpe3d.evaluate.settings import Ask
from rpe3d.evaluate.tasks import longbench, parse_tasks
from rpe3d.evaluate.tasks.chat import Chat
from rpe3d.evaluate.tasks.predictions import predictions_file
from rpe3d.evaluate.tasks.questions import Data
from rpe3d.geometry import LawSpec

HOTPOT, SAMSUM, GSM = ("longbench", "hotpotqa"), ("longbench", "samsum"), ("leval", "gsm100")
ANSWERS = ["Paris", "Rome", "Oslo", "Bern", "Riga"]
DATA = {
    HOTPOT: [{"context": f"It is {a}.", "input": "Where?", "answers": [a], "all_classes": None} for a in ANSWERS],
    SAMSUM: [{"context": f"{a}: hi", "input": "Summary:", "answers": [a], "all_classes": None} for a in ANSWERS],
    GSM: [{"input": f"{i} + 1", "instructions": ["?"], "outputs": [str(i)], "evaluation": "exam"} for i in (7, 8)],
}
WORDS = [Text(name="words", content=" ".join(f"word {i * i} and" for i in range(400)))]


@pytest.fixture
def chat(tokenizer):
    return Chat(tokenizer=tokenizer, form="none")


def run(model, chat, tasks=(HOTPOT,), file=None, overwrite=False, generate=None, data=DATA, **asked):
    asked = {"tasks": tasks, "lengths": [1024], **asked}
    read = {task: Data(name=task[1], records=data[task]) for task in tasks if task in data}
    texts = {task: WORDS for task in tasks if task not in data}
    return evaluate(
        model,
        chat,
        Ask(**asked),
        data=read,
        texts=texts,
        file=file,
        overwrite=overwrite,
        name="tiny",
        generate=generate,
    )


class Scripted:
    """A model that gives right answers, remembers what it was asked, and is interrupted at a call."""

    def __init__(self, stop=None, error=KeyboardInterrupt):
        self.calls, self.stop, self.error = [], stop, error

    def __call__(self, prompts, max_new, line_only):
        if len(self.calls) == self.stop:
            raise self.error
        self.calls.append((list(prompts), max_new, line_only))
        return [next((a for a in [*ANSWERS, "7", "8"] if a in prompt), "") for prompt in prompts]


def test_right_answers_score_100_and_are_kept_in_upstreams_format(model, chat, tmp_path):
    script = Scripted()
    results = run(model, chat, [HOTPOT, SAMSUM, GSM], tmp_path / "r.json", generate=script, batch=2)
    assert [(r["suite"], r["task"], r["score"], r["n"]) for r in results["rows"]] == [
        ("longbench", "hotpotqa", 100.0, 5),
        ("longbench", "samsum", 100.0, 5),
        ("leval", "gsm100", 100.0, 2),
    ]
    assert [(len(prompts), most, line) for prompts, most, line in script.calls] == [
        (2, 32, False), (2, 32, False), (1, 32, False), (2, 128, True), (2, 128, True), (1, 128, True), (2, 512, False)
    ]  # fmt: skip
    assert json.loads((tmp_path / "r.json").read_text()) == results
    lines = [json.loads(line) for line in (tmp_path / results["rows"][0]["predictions"]).read_text().splitlines()]
    assert set(lines[0]) == {"index", "pred", "answers", "all_classes", "length", "made_from"}
    assert longbench.score("hotpotqa", lines).score == 100.0
    gsm = (tmp_path / results["rows"][2]["predictions"]).read_text().splitlines()
    assert set(json.loads(gsm[0])) == {"index", "query", "gt", "prompt", "evaluation", "rpe3d_pred", "made_from"}


def test_an_interrupted_run_goes_on_where_it_was(model, chat, tmp_path):
    file = tmp_path / "r.json"
    with pytest.raises(KeyboardInterrupt):
        run(model, chat, file=file, generate=Scripted(stop=3))
    assert json.loads(file.read_text())["rows"] == []
    (kept,) = tmp_path.glob("r.predictions/**/*.jsonl")
    assert len(kept.read_text().splitlines()) == 3
    with open(kept, "ab") as torn:
        torn.write('{"index": 4, "pred": "Öz'.encode()[:-1])  # what a kill leaves, in the middle of a letter
    script = Scripted()
    (row,) = run(model, chat, file=file, generate=script)["rows"]
    assert (row["score"], row["n"], len(script.calls)) == (100.0, 5, 2)
    again = Scripted()
    assert run(model, chat, file=file, generate=again)["rows"] == [row]
    assert again.calls == []


def test_one_file_collects_laws_and_tasks_over_several_commands(model, chat, tmp_path):
    file = tmp_path / "r.json"
    run(model, chat, file=file, generate=Scripted())
    run(model, chat, file=file, generate=Scripted(), laws=[LawSpec(label="dca", name="dca", parameters={})])
    rows = run(model, chat, [HOTPOT, GSM], file=file, generate=Scripted())["rows"]
    assert [(r["law"], r["task"]) for r in rows] == [("stock", "hotpotqa"), ("dca", "hotpotqa"), ("stock", "gsm100")]


def test_results_of_something_else_are_refused_or_replaced_when_asked(model, chat, tmp_path):
    file = tmp_path / "r.json"
    mine = [LawSpec(label="mine", name="dca", parameters={"chunk": 64})]
    run(model, chat, file=file, generate=Scripted(), laws=mine)
    before = file.read_text()
    other = {**DATA, HOTPOT: DATA[HOTPOT][:2]}
    changes = {
        "settings": {"limit": 3},
        "data": {"data": other},
        "laws": {"laws": [LawSpec(label="mine", name="dca", parameters={"chunk": 32})]},
    }
    for part, change in changes.items():
        with pytest.raises(ConfigError, match=f"holds results of other {part}"):
            run(model, chat, file=file, generate=Scripted(), **{"laws": mine, **change})
    assert file.read_text() == before
    script = Scripted()
    (row,) = run(model, chat, file=file, generate=script, laws=mine, data=other, overwrite=True)["rows"]
    assert (row["n"], len(script.calls)) == (2, 2)


def test_predictions_are_used_again_only_where_they_were_made_from_the_same(model, chat, tmp_path):
    """Each line says what it was made from, so that it can be trusted even without its results file."""
    file, again = tmp_path / "r.json", Scripted()
    (row,) = run(model, chat, file=file, generate=Scripted())["rows"]
    file.unlink()
    (resumed,) = run(model, chat, file=file, generate=again)["rows"]
    assert (resumed["score"], again.calls) == (row["score"], [])
    file.unlink()
    before = (tmp_path / row["predictions"]).read_bytes()
    with pytest.raises(ConfigError, match=r"line 1 of .*hotpotqa\.jsonl was predicted from another model"):
        run(model, chat, file=file, generate=Scripted(), data={**DATA, HOTPOT: DATA[HOTPOT][:2]})
    assert (tmp_path / row["predictions"]).read_bytes() == before


def test_overwriting_some_rows_leaves_no_predictions_of_the_others(model, chat, tmp_path):
    """Issue 20, point 10: the second model's row had the first model's score."""
    file = tmp_path / "r.json"
    run(model, chat, [HOTPOT, GSM], file, generate=Scripted())
    torch.nn.init.zeros_(model.lm_head.weight)
    run(model, chat, [HOTPOT], file, generate=Scripted(), overwrite=True)
    script = Scripted()
    run(model, chat, [HOTPOT, GSM], file, generate=script)
    assert len(script.calls) == 2


def test_a_checkpoints_own_law_is_not_the_law_of_that_name(model, chat, tmp_path):
    """Without `--law` the row of an extended checkpoint has the name of its law, whatever its parameters are."""
    rpe3d.extend(model, "dca", context=2048, chunk=32)
    run(model, chat, file=tmp_path / "r.json", generate=Scripted())
    dca = [LawSpec(label="dca", name="dca", parameters={})]
    with pytest.raises(ConfigError, match="holds results of other laws"):
        run(model, chat, file=tmp_path / "r.json", generate=Scripted(), laws=dca)


def test_no_two_rows_share_a_predictions_file():
    """Labels that differ in punctuation only, `ppl` and a folder called ppl, and results of two endings."""
    rows = [
        (law, "ppl", task) for law in ("my law", "my_law", "my/law", "my%20law") for task in ("", "ppl", "a b", "a_b")
    ]
    names = [Path("r.json"), Path("r"), Path("r.txt")]
    found = [predictions_file(name, (law, 256, suite, task)) for name in names for law, suite, task in rows]
    assert len(set(found)) == len(found)


FULL = (
    torch.OutOfMemoryError(),
    MemoryError(),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("Expected mha_graph.execute(handle, variant_pack, workspace_ptr.get()).is_good() to be true"),
)


@pytest.mark.parametrize("error", FULL, ids=str)
def test_running_out_of_memory_is_the_rows_result(model, chat, tmp_path, error):
    full = Scripted(stop=2, error=error)
    rows = run(model, chat, [HOTPOT, GSM], tmp_path / "r.json", generate=full)["rows"]
    assert [row["status"] for row in rows] == ["out of memory", "out of memory"]
    rows = run(model, chat, [HOTPOT, GSM], tmp_path / "r.json", generate=Scripted())["rows"]
    assert [(row["status"], row["score"]) for row in rows] == [("ok", 100.0)] * 2


def test_other_errors_are_no_lack_of_memory(model, chat):
    with pytest.raises(RuntimeError, match="device-side assert"):
        run(model, chat, generate=Scripted(stop=0, error=RuntimeError("CUDA error: device-side assert triggered")))


def test_a_row_that_cannot_be_made_says_so_and_the_others_go_on(model, chat, tmp_path):
    for _ in range(2):  # going on meets the same row again
        rows = run(model, chat, file=tmp_path / "r.json", generate=Scripted(), lengths=[512, 1024])["rows"]
        assert [(row["length"], row["score"]) for row in rows] == [(512, None), (1024, 100.0)]
        assert rows[0]["status"].startswith("skipped: LongBench has no room in a context of 512: raise --length")
        assert rows[1]["status"] == "ok"
        assert json.loads((tmp_path / "r.json").read_text())["rows"] == rows


def test_likelihoods_that_are_not_finite_are_a_row_that_says_so(model, chat, tmp_path):
    torch.nn.init.constant_(model.lm_head.weight, math.nan)
    tasks = [*parse_tasks(["ppl", "copy"]), HOTPOT]
    rows = run(model, chat, tasks, tmp_path / "r.json", generate=Scripted(), windows=1, copies=1)["rows"]
    assert [row["status"].split(":")[0] for row in rows] == ["skipped", "skipped", "ok"]
    assert "gave no finite number" in rows[0]["status"]


def test_questions_are_made_once_for_all_laws_and_rows_keep_the_order_asked(model, chat, monkeypatch):
    made = []
    samples = longbench.samples
    monkeypatch.setattr(longbench, "samples", lambda *a: made.append((a[0], a[3])) or samples(*a))
    laws = [LawSpec(label=name, name=name, parameters={}) for name in ("rope", "dca")]
    rows = run(model, chat, [HOTPOT, SAMSUM], generate=Scripted(), laws=laws, lengths=[1024, 2048])["rows"]
    assert made == [(task, length) for length in (1024, 2048) for task in ("hotpotqa", "samsum")]
    assert [(row["law"], row["length"], row["task"]) for row in rows] == [
        (law, length, task) for law in ("rope", "dca") for length in (1024, 2048) for task in ("hotpotqa", "samsum")
    ]


def test_the_models_own_answers_do_not_depend_on_the_batch(model, chat):
    model.generation_config.update(do_sample=True, temperature=0.3, top_p=0.5)  # as chat checkpoints have it
    said = []
    for batch in (1, 3):
        from rpe3d.evaluate.tasks.generate import generator

        generate = generator(model, chat)
        prompts = ["a long prompt of many words", "short", "middling one"]
        said.append([x for at in range(0, 3, batch) for x in generate(prompts[at : at + batch], 12, False)])
    assert said[0] == said[1]
    assert len(set(said[0])) == 3


def test_a_long_prompt_is_read_in_pieces_and_answered_alike(model, chat, monkeypatch):
    """Rows of a padded batch stay together, and are read at once."""
    from rpe3d.evaluate.tasks.generate import generator
    from rpe3d.models import pieces

    generate, prompts = generator(model, chat), ["a long prompt of many words", "short"]
    expected = [generate([prompt], 12, False)[0] for prompt in prompts]
    read = []
    hook = model.model.layers[0].register_forward_hook(lambda *call: read.append(call[-1].shape[1]))
    monkeypatch.setattr(pieces, "AT_ONCE", 16)
    monkeypatch.setattr(pieces, "PIECE", 10)
    assert [generate([prompt], 12, False)[0] for prompt in prompts] == expected
    assert read[0] == read[1] == 10
    read.clear()
    assert generate(prompts, 12, False) == expected
    hook.remove()
    assert read[0] > 16


def test_a_line_break_ends_an_answer_after_its_first_token(model, chat, monkeypatch):
    seen = {}
    generate = type(model).generate
    monkeypatch.setattr(type(model), "generate", lambda self, *a, **k: seen.update(k) or generate(self, *a, **k))
    from rpe3d.evaluate.tasks.generate import generator

    generator(model, chat)(["x"], 4, True)
    assert seen["min_new_tokens"] == 1
    assert seen["eos_token_id"] == [chat.tokenizer.encode("\n")[-1]]
    assert (seen["do_sample"], seen["num_beams"], seen["max_new_tokens"]) == (False, 1, 4)


@pytest.mark.parametrize("error", FULL, ids=str)
def test_a_batch_that_is_too_large_is_halved(model, chat, monkeypatch, error):
    from rpe3d.evaluate.tasks import generate as module

    sizes = []

    def answers(model, chat, prompts, max_new, line_only):
        sizes.append(len(prompts))
        if len(prompts) > 2:
            raise error
        return [prompt.upper() for prompt in prompts]

    monkeypatch.setattr(module, "_answers", answers)
    assert module.generator(model, chat)(list("abcde"), 1, False) == list("ABCDE")
    assert sizes == [5, 2, 3, 1, 2]


def test_probes_are_those_of_compare_and_leave_the_model_as_it_was(model, chat, tmp_path):
    before = model(torch.arange(1, 200)[None]).logits
    tasks = parse_tasks(["ppl", "copy", "passkey"])
    laws = [LawSpec(label=name, name=name, parameters={}) for name in ("rope", "dca")]
    asked = {"lengths": [512], "laws": laws, "windows": 2, "copies": 2, "passkeys": 2}
    rows = run(model, chat, tasks, tmp_path / "r.json", **asked)["rows"]
    assert torch.equal(model(torch.arange(1, 200)[None]).logits, before)
    rpe3d.extend(model, "dca", context=512)
    own = perplexity(model, [tokenize(chat.tokenizer, WORDS[0])], 512, windows=2)
    assert {(r["law"], r["suite"]): r["score"] for r in rows}["dca", "ppl"] == own
    assert [r["n"] for r in rows] == [2] * 6
    lines = [json.loads(line) for line in (tmp_path / rows[0]["predictions"]).read_text().splitlines()]
    assert rows[0]["score"] == pytest.approx(math.exp(sum(line["nll"] for line in lines) / 2))


def test_a_checkpoint_with_a_law_is_measured_under_it_and_keeps_it(model, chat):
    rpe3d.extend(model, "3d-rpe", context=1024)
    before = model(torch.arange(600)[None] % 257).logits
    as_it_is = run(model, chat, generate=Scripted())["rows"]
    rope = [LawSpec(label="rope", name="rope", parameters={})]
    laws_seen = []
    stock = run(model, chat, generate=lambda p, *_: laws_seen.append(rpe3d.law_of(model)) or [""] * len(p), laws=rope)[
        "rows"
    ]
    assert ([r["law"] for r in as_it_is], [r["law"] for r in stock]) == (["3d-rpe"], ["rope"])
    assert set(laws_seen) == {None}
    assert torch.equal(model(torch.arange(600)[None] % 257).logits, before)


def test_a_law_that_has_no_form_for_a_length_is_a_row_that_says_so(model, chat):
    tight = [LawSpec(label="3d-rpe", name="3d-rpe", parameters={"chunk": 8, "window": 16, "reach": 20})]
    with pytest.raises(ConfigError, match="reach is 20, below window"):
        run(model, chat, generate=Scripted(), laws=tight)
    good = LawSpec(label="good", name="dca", parameters={})
    rows = run(model, chat, generate=Scripted(), laws=[*tight, good])["rows"]
    assert [row["status"].split(":")[0] for row in rows] == ["skipped", "ok"]


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["longbenc"], "suite of tasks 'longbenc' is not known: did you mean 'longbench'"),
        (["longbench:lc"], "longbench task 'lc' is not known: did you mean 'lcc'"),
        (["passkey:x"], "passkey has no task 'x'"),
    ],
)
def test_a_task_that_is_not_known_is_refused(names, problem):
    with pytest.raises(ConfigError, match=problem):
        parse_tasks(names)


def test_a_suite_alone_is_the_papers_tasks_of_it():
    assert len(parse_tasks(["longbench", "longbench:lcc", "leval", "ruler", "ppl", "ppl:pg19"])) == 16 + 5 + 11 + 2
