"""`rpe3d extend` changes the config of a checkpoint and nothing else."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from refusal import refusal

import rpe3d
import tiny_lm
from rpe3d.cli import main
from rpe3d.models.load import load

LAW = {"chunk": 16, "window": 32, "reach": 64}
FLAGS = [word for name, tokens in LAW.items() for word in (f"--{name}", str(tokens))]
pytestmark = pytest.mark.usefixtures("one_thread")


def checkpoint(folder, dtype, tied=False, **how):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {**tiny_lm.SIZES, "num_hidden_layers": 4, "tie_word_embeddings": tied}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=257, **sizes)).to(dtype)
    model.generation_config.top_p = 0.9
    model.generation_config.do_sample = True
    model.save_pretrained(folder, **how)
    tokenizer = tiny_lm.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text("mine")
    (folder / "consolidated.00.pth").write_text("the same weights in another form")
    (folder / ".cache").mkdir()
    return folder


def extended(folder, out, *more):
    assert main(["extend", str(folder), "--context", "1k", "--out", str(out), *FLAGS, *more]) == 0
    return out


@pytest.mark.parametrize(
    ("dtype", "how"),
    [
        (torch.bfloat16, {}),
        (torch.float16, {"tied": True}),
        (torch.float32, {"max_shard_size": "40KB"}),
        (torch.bfloat16, {"tied": True, "max_shard_size": "20KB"}),
    ],
)
def test_weights_are_copied_byte_for_byte_and_the_config_carries_the_law(tmp_path, dtype, how):
    folder = checkpoint(tmp_path / "model", dtype, **how)
    out = extended(folder, tmp_path / "long")
    changed = {"config.json", "tokenizer_config.json", "README.md"}
    names = {path.name for path in folder.iterdir()} - {"consolidated.00.pth", ".cache"}
    assert {path.name for path in out.iterdir()} == names | {"README.base.md"}
    assert (out / "README.base.md").read_text() == "mine"
    assert (sum(name.endswith(".safetensors") for name in names) > 1) == ("max_shard_size" in how)
    for name in names - changed:
        assert (out / name).read_bytes() == (folder / name).read_bytes(), name
    before, after = (json.loads((f / "config.json").read_text()) for f in (folder, out))
    assert {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)} <= {
        "rope_parameters", "max_position_embeddings", "transformers_version",
    }  # fmt: skip
    assert json.loads((out / "tokenizer_config.json").read_text())["model_max_length"] == 1024


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_copy_writes_what_the_model_extended_in_memory_writes(tmp_path, dtype):
    folder = checkpoint(tmp_path / "model", dtype, max_shard_size="40KB")
    again = load(str(extended(folder, tmp_path / "long")), dtype="auto", device="cpu")
    memory = load(str(folder), dtype="auto", device="cpu").model
    rpe3d.extend(memory, context=1024, **LAW)
    assert again.model.dtype == memory.dtype == dtype
    assert rpe3d.law_of(again.model) == rpe3d.law_of(memory)
    ids = torch.randint(1, 257, (1, 400))
    written = [m.generate(ids, max_new_tokens=12, do_sample=False, top_p=None) for m in (again.model, memory)]
    assert torch.equal(*written)
    assert again.tokenizer.model_max_length == 1024
    assert again.tokenizer.chat_template


def test_a_copy_can_be_extended_again(tmp_path):
    folder = checkpoint(tmp_path / "model", torch.bfloat16)
    out = extended(extended(folder, tmp_path / "once"), tmp_path / "twice", "--law", "3d-rpe")
    assert (out / "config.json").read_bytes() == (tmp_path / "once" / "config.json").read_bytes()


def test_a_checkpoint_has_a_model_card_and_keeps_the_card_of_its_base(tmp_path, capsys):
    """No path of this machine is in it; what the base says of its license stays."""
    folder = checkpoint(tmp_path / "model", torch.bfloat16)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    out = extended(folder, tmp_path / "long")
    said = capsys.readouterr().err.splitlines()
    assert said[-2] == "3d-rpe from 256 to 1024 tokens, chunk 16, window 32, reach 64, focus 2, fade 0.125, sinks 0"
    card = (out / "README.md").read_text()
    assert str(tmp_path) not in card
    assert "license: apache-2.0" in card
    assert "| reach | 64 |" in card
    assert "import rpe3d" in card
    assert (out / "README.base.md").read_text().endswith("# Base\n")
    again = extended(out, tmp_path / "again")
    assert (again / "README.base.md").read_text().endswith("# Base\n")
    assert "# long, 1024 tokens" in (again / "README.md").read_text()


def test_law_parameters_are_refused_before_the_weights_are_read(tmp_path, capsys, monkeypatch):
    """The config alone tells the lengths."""
    folder = checkpoint(tmp_path / "model", torch.bfloat16)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("read"))
    for verb, more in (
        ("extend", ["--context", "1k", "--law", "3d-rpe:reach=8", "--out", tmp_path / "o"]),
        ("compare", ["--laws", "rope,3d-rpe:reach=8", "--lengths", "512"]),
        ("eval", ["--laws", "3d-rpe:reach=8", "--lengths", "512", "--tasks", "ppl"]),
        ("bench", ["--law", "3d-rpe:reach=8", "--length", "512"]),
    ):
        code, problem, _ = refusal(capsys, verb, folder, *more)
        assert (code, problem) == (1, "reach is 8, below window + chunk = 32"), verb
    code, problem, _ = refusal(capsys, "tune", folder, "--context", "100", "--out", tmp_path / "law.json")
    assert (code, problem) == (1, "context is 100, below the pretrained length 256")


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--law", "3d-rpe:chunk=16", "--chunk", "32"], "chunk is given twice: in --law 3d-rpe:chunk=16,"),
        (["--law", "3d-rpe:chunk=16,chunk=32"], "chunk is given twice in '3d-rpe:chunk=16,chunk=32'"),
        (["--chunk", "16", "--set", "chunk=32"], "chunk is given twice"),
        (["--set", "fade=0", "--set", "fade=1"], "fade is given twice"),
    ],
)
def test_a_parameter_is_given_once(capsys, tmp_path, more, problem):
    """Of two values one would be dropped without a word."""
    argv = ("extend", "/nowhere/at/all", "--context", "1k", "--out", tmp_path / "o")
    for verb in (argv, ("generate", "/nowhere/at/all", "x")):
        code, said, hint = refusal(capsys, *verb, *more)
        assert code == 1
        assert said.startswith(problem)
        assert hint.startswith("give it once")


def test_a_law_file_yields_to_an_option(tmp_path):
    """A file is a starting point, as a recipe is."""
    folder = checkpoint(tmp_path / "model", torch.bfloat16)
    made = rpe3d.make_law("3d-rpe", pretrained=256, context=1024, head_dim=16, chunk=8, window=32)
    (tmp_path / "law.json").write_text(made.json)
    out = extended(folder, tmp_path / "long", "--law", str(tmp_path / "law.json"))
    assert json.loads((out / "config.json").read_text())["rope_parameters"]["law"]["chunk"] == LAW["chunk"]


def test_a_law_that_is_replaced_is_said(tmp_path, capsys):
    """The defaults would else take the place of what was tuned, without a word."""
    once = extended(checkpoint(tmp_path / "model", torch.bfloat16), tmp_path / "once")
    extended(once, tmp_path / "same")
    assert "carried (" not in capsys.readouterr().err
    assert main(["extend", str(once), "--context", "1k", "--out", str(tmp_path / "twice")]) == 0
    assert f"note: the law that {once} carried (3d-rpe from 256 to 1024 tokens, chunk 16" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["extend", "merge"])
def test_a_place_that_cannot_be_written_to_is_refused_before_any_work(tmp_path, capsys, verb):
    (tmp_path / "file").write_text("mine")
    more = ("--context", "1k") if verb == "extend" else ()
    argv = (verb, "/nowhere/at/all", "--out", tmp_path / "file" / "new", *more)
    assert refusal(capsys, *argv) == (1, f"{tmp_path / 'file'} is a file, not a folder", "pass another path to --out")
    code, problem, _ = refusal(capsys, verb, "/nowhere/at/all", "--out", tmp_path / "\udcff", *more)
    assert (code, problem.partition(" is not UTF-8")[1]) == (1, " is not UTF-8")


def test_another_type_is_written_where_it_is_asked_for(tmp_path):
    folder = checkpoint(tmp_path / "model", torch.bfloat16)
    out = extended(folder, tmp_path / "long", "--dtype", "float16")
    assert load(str(out), dtype="auto", device="cpu").model.dtype == torch.float16
    assert json.loads((out / "config.json").read_text())["dtype"] == "float16"


def test_a_model_of_the_hub_is_copied_out_of_its_cache(tmp_path, monkeypatch):
    """Files in the cache are links, and there may be more of them than the model needs. The hub is never asked."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)
    monkeypatch.setattr("rpe3d.models.load._hub_can_be_asked", lambda: False)
    folder = checkpoint(tmp_path / "model", torch.bfloat16)
    snapshot = tmp_path / "hub" / "models--me--tiny" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    for path in folder.iterdir():
        if path.is_file():
            (snapshot / path.name).symlink_to(path)
    monkeypatch.setattr("huggingface_hub.file_download.get_hf_file_metadata", lambda *_, **__: pytest.fail("asked"))
    out = extended("me/tiny", tmp_path / "long")
    assert (out / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert not any(path.is_symlink() for path in out.iterdir())


def test_what_cannot_be_extended_or_copied_leaves_nothing(tmp_path, capsys, monkeypatch):
    folder = checkpoint(tmp_path / "model", torch.bfloat16)
    out = tmp_path / "long"
    code, problem, _ = refusal(capsys, "extend", folder, "--context", "1k", "--out", out, "--reach", "8")
    assert code == 1
    assert "reach is 8" in problem

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    code, problem, _ = refusal(capsys, "extend", folder, "--context", "1k", "--out", out)
    assert (code, problem) == (1, f"cannot write {out}: No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
