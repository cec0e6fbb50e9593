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
    changed = {"config.json", "tokenizer_config.json"}
    names = {path.name for path in folder.iterdir()} - {"consolidated.00.pth", ".cache"}
    assert {path.name for path in out.iterdir()} == names
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


def test_another_type_is_written_where_it_is_asked_for(tmp_path):
    folder = checkpoint(tmp_path / "model", torch.bfloat16)
    out = extended(folder, tmp_path / "long", "--dtype", "float16")
    assert load(str(out), dtype="auto", device="cpu").model.dtype == torch.float16
    assert json.loads((out / "config.json").read_text())["dtype"] == "float16"


def test_a_model_of_the_hub_is_copied_out_of_its_cache(tmp_path, monkeypatch):
    """Files in the cache are links, and there may be more of them than the model needs."""
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
