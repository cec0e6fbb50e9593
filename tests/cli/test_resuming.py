"""A fuzzer of resuming: whatever changed since, rows are those of a fresh run, or a refusal that loses nothing.

The oracle is the same command in an empty folder. A failure names its seed and its steps; `--fuzz N` plays N times as
many sequences.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import pytest

import rpe3d
import tiny_lm
from rpe3d.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")
SEQUENCES = 6
STEPS = 10
TIMED = ("seconds", "tokens_per_second", "samples_per_minute")
SHARED = {"--seed": "01", "--windows": "12", "--copies": "12", "--passkeys": "12"}
SHARED |= {"--dtype": ("float32", "bfloat16"), "--protocol": ("windows", "sliding_new_tokens")}
KNOBS = {
    "compare": SHARED | {"--laws": ("rope", "rope,dca", "{law}", "dca:chunk=64"), "--lengths": ("256", "256,320")}
    | {"--measures": ("ppl,copy", "ppl,copy,passkey"), "--batch": "12"},
    "eval": SHARED | {"--law": ("", "dca", "dca,{law}", "{law}"), "--length": ("1k", "1k,2k"), "--limit": "12"}
    | {"--tasks": ("longbench:hotpotqa", "ppl,passkey", "longbench:hotpotqa,longbench:lcc,copy"), "--batch": "12"}
    | {"--chat": ("none", "llama2", "template"), "--chat-rules": ("upstream", "authors")},
}  # fmt: skip
COLLECTED = ("--law", "--length", "--tasks", "--batch")
"""What one results file of `eval` may have several of."""


@dataclass
class World:
    """A model, texts, data and a law on disk, the command's options, and the folder where its results lie."""

    verb: str
    root: Path
    options: dict[str, str] = field(default_factory=dict)

    @property
    def results(self) -> Path:
        return self.root / "out" / "r.json"

    def argv(self, options: dict[str, str], results: Path) -> list[str]:
        given = [part for name, value in options.items() if value for part in (name, value)]
        given += ["--data", str(self.root / "data")] if self.verb == "eval" else []
        fixed = ["--texts", str(self.root / "text.txt"), "--device", "cpu", "--json", str(results)]
        return [part.format(law=self.root / "my law.json") for part in [str(self.root / "model"), *given, *fixed]]

    def state(self) -> str:
        """A digest of everything that may decide a row's numbers, but for what one file of `eval` collects."""
        files = [path for place in ("model", "data") for path in sorted((self.root / place).iterdir())]
        raw = [path.read_bytes() for path in [*files, self.root / "text.txt", self.root / "my law.json"]]
        told = {k: v for k, v in self.options.items() if self.verb == "compare" or k not in COLLECTED}
        return hashlib.sha256(b"|".join([*raw, repr(told).encode()])).hexdigest()


def make(verb, root, base):
    shutil.copytree(base, root)
    (root / "out").mkdir()
    return World(verb, root, {name: values[0] for name, values in KNOBS[verb].items()})


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    root = tmp_path_factory.mktemp("base")
    tiny_lm.save(root / "model")
    (root / "model" / "chat_template.jinja").write_text("A: {{ messages[0]['content'] }}")
    (root / "model" / "generation_config.json").write_text('{"repetition_penalty": 1.0}')
    draw = random.Random(0)
    (root / "text.txt").write_text("".join(draw.choice("abcdefg hijklm\n") for _ in range(2600)))
    (root / "data").mkdir()
    for task in ("hotpotqa", "lcc"):
        records = [{"context": f"{task} {i} is", "input": "x", "answers": [f"a{i}"]} for i in range(3)]
        (root / "data" / f"{task}.jsonl").write_text("\n".join(map(json.dumps, records)))
    law(root, 32)
    return root


def law(root, chunk):
    made = rpe3d.make_law("dca", pretrained=256, context=2048, head_dim=16, chunk=chunk)
    (root / "my law.json").write_text(made.json)


# --- changes of one thing


def quietly(path, change):
    """Rewrite a file so that neither its size nor its time tells."""
    before, raw = path.stat(), path.read_bytes()
    changed = change(raw)
    assert len(changed) == len(raw) != 0
    assert changed != raw
    path.write_bytes(changed)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def swap(one, other):
    return lambda raw: raw.replace(one, b"\0").replace(other, one).replace(b"\0", other)


def trained(raw):
    """One step on one number of the last tensor: its sign and exponent."""
    return raw[:-1] + bytes([raw[-1] ^ 0x01])


CHANGES = {
    "weights": lambda w: quietly(w.root / "model/model.safetensors", trained),
    "config": lambda w: quietly(w.root / "model/config.json", swap(b"1e-06", b"1e-01")),
    "tokenizer": lambda w: quietly(w.root / "model/tokenizer.json", swap(b'"a"', b'"b"')),
    "template": lambda w: quietly(w.root / "model/chat_template.jinja", swap(b"A:", b"B:")),
    "generation": lambda w: quietly(w.root / "model/generation_config.json", swap(b"1.0", b"1.8")),
    "text": lambda w: quietly(w.root / "text.txt", swap(b"a", b"e")),
    "data": lambda w: quietly(w.root / "data/hotpotqa.jsonl", swap(b"hotpotqa", b"hotpotQA")),
    "law": lambda w: law(w.root, 48 if '"chunk": 32' in (w.root / "my law.json").read_text() else 32),
}
EVAL_ONLY = ("template", "generation", "data")


def predicted(world):
    return sorted((world.root / "out").rglob("*.jsonl"))


def torn(world, draw):
    """What a kill leaves in the middle of a line."""
    for path in predicted(world)[:1]:
        path.write_bytes(path.read_bytes() + '{"index": 1, "pred": "ö'.encode()[:-1])


def killed(world, draw):
    """What another process that was killed leaves beside the results."""
    (world.root / "out" / ".999-r.json").write_text("{")
    (world.root / "out" / ".r.json.lock").touch()


def lost(world, draw):
    world.results.unlink(missing_ok=True)


def edited(world, change):
    if world.results.exists():
        content = json.loads(world.results.read_text())
        change(content)
        world.results.write_text(json.dumps(content))


def older(world, draw):
    """What rpe3d wrote before it had fingerprints."""
    edited(world, lambda content: content["model"].pop("fingerprint", None))


def upgraded(world, draw):
    edited(world, lambda content: content["versions"].update(torch="1.0"))


def newer(world, draw):
    edited(world, lambda content: content.update(schema=2))


HARMLESS, HARMFUL = (torn, killed, lost), (older, upgraded, newer)

# --- runs


class Interrupted:
    """Stops a run at the n-th row, batch or write."""

    def __init__(self, patch, after):
        self.left = after
        places = {"compare": "measure_row", "store": "write_json"}
        places |= {"evaluation": "probe", "tasks.generate": "_answers"}
        for place, name in places.items():
            module = import_module(f"rpe3d.evaluate.{place}")
            patch.setattr(module, name, self.counted(getattr(module, name)))

    def counted(self, work):
        def call(*args, **kwargs):
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return work(*args, **kwargs)

        return call


@dataclass
class Player:
    world: World
    patch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]
    known: dict = field(default_factory=dict)
    owner: str | None = None
    """The state that the results folder is of."""
    doubtful: bool = False
    """Somebody else has changed the results folder, so that a refusal is right."""

    def call(self, argv):
        self.capsys.readouterr()
        code = main([self.world.verb, *argv])
        return code, self.capsys.readouterr().err

    def fresh(self, options):
        """The rows and predictions of the command in an empty folder, by key."""
        at = self.world.state(), tuple(options.items())
        if at not in self.known:
            place = self.world.root / f"fresh-{len(self.known)}"
            place.mkdir()
            self.call(self.world.argv(options, place / "r.json"))
            content = json.loads((place / "r.json").read_text())
            self.known[at] = {key(row): numbers(row, place) for row in content["rows"]}
        return self.known[at]

    def expected(self, row):
        if self.world.verb == "compare":
            return self.fresh(self.world.options)[key(row)]
        label = row["law"]
        law = {"stock": "", "my law": "{law}"}.get(label, label)
        told = {"--law": law, "--length": str(row["length"]), "--batch": str(row["batch"])}
        told["--tasks"] = ":".join(filter(None, (row["suite"], row["task"])))
        return self.fresh(self.world.options | told)[key(row)]

    def run(self, overwrite=False, stop=None):
        world, state = self.world, self.world.state()
        before = contents(world)
        with self.patch.context() as patch:
            if stop is not None:
                Interrupted(patch, stop)
            code, said = self.call([*world.argv(world.options, world.results), *["--overwrite"] * overwrite])
        after = contents(world)
        if "error: " in said:
            assert code == 1
            assert "\nhint: " in said
            assert after == before, "a refusal changed the results"
            live = not self.doubtful and (overwrite or self.owner in (None, state))
            assert not live, f"refused its own results: {said}"
            return said.split("error: ")[1].splitlines()[0]
        if overwrite and after != before:
            self.owner, self.doubtful = state, False
        elif self.owner not in (None, state):
            self.doubtful = True  # predictions of another state may lie where rows of this one come later
        if after.get("r.json") != before.get("r.json"):
            self.owner = state
        if world.results.exists() and (code != 130 or self.owner == state):
            for row in json.loads(world.results.read_text())["rows"]:
                assert numbers(row, world.root / "out") == self.expected(row)
        return code


def key(row):
    return tuple(row.get(name) for name in ("law", "length", "suite", "task"))


def numbers(row, folder):
    """A row without its times, and its predictions."""
    lines = sorted((folder / row["predictions"]).read_bytes().splitlines()) if row.get("predictions") else []
    return {k: v for k, v in row.items() if k not in TIMED}, [line for line in lines if not line.endswith(b"\xc3")]


def contents(world):
    out = world.root / "out"
    return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file() and p.name[0] != "."}


def change(world, kind, draw):
    """Change one thing that decides a row, and name it."""
    if kind == "change":
        name = draw.choice([name for name in CHANGES if world.verb == "eval" or name not in EVAL_ONLY])
        CHANGES[name](world)
        return name
    name = draw.choice(list(world.options))
    world.options[name] = draw.choice(KNOBS[world.verb][name])
    return f"{name} {world.options[name]}"


def step(player, draw):
    """One random thing, and what came of it."""
    world = player.world
    kind = draw.choice(
        ("change", "change", "knob", "knob", "leftover", "run", "interrupted", "interrupted", "overwrite")
    )
    if kind in ("change", "knob"):
        return f"{change(world, kind, draw)}; run: {player.run() if draw.random() < 0.6 else 'not now'}"
    if kind == "leftover":
        leave = draw.choice(HARMLESS * 2 + HARMFUL)
        player.doubtful |= leave in HARMFUL and world.results.exists()
        leave(world, draw)
        return leave.__name__
    overwrite = kind == "overwrite" or draw.random() < 0.2
    stop = draw.randrange(5) if kind == "interrupted" else None
    return (
        f"run {'--overwrite' * overwrite} {'' if stop is None else f'stopped at {stop}'}: {player.run(overwrite, stop)}"
    )


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(SEQUENCES * metafunc.config.getoption("--fuzz")))


@pytest.mark.parametrize("verb", ["compare", "eval"])
def test_rows_are_those_of_a_fresh_run_or_a_refusal_loses_nothing(base, tmp_path, monkeypatch, capsys, verb, seed):
    from rpe3d.evaluate.tasks import generate

    answers = generate._answers
    monkeypatch.setattr(generate, "_answers", lambda m, chat, p, max_new, line: answers(m, chat, p, 3, line))
    player = Player(make(verb, tmp_path / "world", base), monkeypatch, capsys)
    draw = random.Random(f"{verb} {seed}")
    steps: list[object] = []
    try:
        steps.append(player.run(stop=draw.choice((None, 2, 4))))
        for _ in range(STEPS):
            steps.append(step(player, draw))
        if not player.doubtful and player.owner in (None, player.world.state()):
            assert not isinstance(player.run(), str)
    except BaseException as error:
        error.add_note(f"seed {seed} of {verb}, after: {'; '.join(map(str, steps))}")
        raise
