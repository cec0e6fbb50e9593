"""A model is known by its weights, its config and its tokenizer, wherever they lie and whatever it is called."""

from __future__ import annotations

import copy
import json
import subprocess
from types import SimpleNamespace

import pytest
import torch

import tiny_lm
from rpe3d.config import ConfigError
from rpe3d.evaluate import Settings, Text, compare
from rpe3d.evaluate.origin import check_same, commit, fingerprint, generation, weights_digest
from rpe3d.models import extend, restore

TEXT = [Text(name="words", content="some words and more of them " * 40)]


def asked(**more):
    return Settings(**{"laws": ["rope"], "lengths": [256], "windows": 1, "measures": ["ppl"], **more})


def test_one_bit_of_any_tensor_changes_the_digest(model):
    """All elements count: the first and the last of each parameter and buffer, one at a time."""
    seen = {weights_digest(model)}
    state = [*model.parameters(), *model.buffers()]
    for tensor in state:
        for at in (0, -1):
            bits = tensor.data.view(-1).view(torch.int32)
            bits[at] ^= 1
            seen.add(weights_digest(model))
            bits[at] ^= 1
    assert len(seen) == 1 + 2 * len(state)


def test_a_swap_of_two_elements_and_another_type_or_shape_change_the_digest(model):
    seen = {weights_digest(model)}
    weight = model.lm_head.weight
    weight.data[[0, 1]] = weight.data[[1, 0]]
    seen.add(weights_digest(model))
    model.lm_head.weight = torch.nn.Parameter(weight.data.T.contiguous())
    seen.add(weights_digest(model))
    seen.add(weights_digest(model.bfloat16()))
    assert len(seen) == 4


def test_a_copy_a_move_and_a_law_that_was_taken_off_change_nothing(model, tokenizer, tmp_path):
    before = fingerprint(model, tokenizer)
    assert fingerprint(copy.deepcopy(model), tokenizer) == before
    tokenizer(["a", "bc"], padding=False, truncation=True, max_length=1)  # leaves its state in the tokenizer
    restore(extend(model, "3d-rpe", context=1024))
    assert fingerprint(model, tokenizer) == before
    from rpe3d.models.load import load

    loaded = [load(str(tiny_lm.save(tmp_path / name)), device="cpu") for name in ("a", "b")]
    one, other = (fingerprint(found.model, found.tokenizer) for found in loaded)
    assert one == other
    assert one["weights"] == before["weights"]


def test_offloaded_weights_are_those_in_memory(model):
    from accelerate import cpu_offload

    before = weights_digest(model)
    assert weights_digest(cpu_offload(model, execution_device="cpu")) == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_digest_does_not_depend_on_the_device(model):
    assert weights_digest(model) == weights_digest(copy.deepcopy(model).cuda())


def test_config_tokenizer_and_generation_count_each_by_themselves(model, tokenizer):
    before = fingerprint(model, tokenizer)
    model.config.rms_norm_eps *= 2
    changed = fingerprint(model, tokenizer)
    assert [name for name in before if before[name] != changed[name]] == ["config"]
    changed = fingerprint(model, tiny_lm.tokenizer(bos=True))
    assert [name for name in before if before[name] != changed[name]] == ["config", "tokenizer"]
    plain = generation(model, None)
    model.generation_config.repetition_penalty = 1.5
    assert len({plain, generation(model, None), generation(model, "{{ messages }}")}) == 3


class Slow:
    """A tokenizer without a backend that could be written out."""

    def __init__(self, vocabulary, shift):
        self.get_vocab = lambda: vocabulary
        self.shift = shift

    def __call__(self, text):
        return SimpleNamespace(input_ids=[ord(letter) + self.shift for letter in text])


def test_a_tokenizer_without_a_backend_counts_by_its_vocabulary_and_tokens(model):
    made = [Slow({"a": 1}, 0), Slow({"a": 2}, 0), Slow({"a": 1}, 1)]
    assert len({fingerprint(model, tokenizer)["tokenizer"] for tokenizer in made}) == 3


def test_an_adapter_and_its_strength_count(model, tokenizer):
    peft = pytest.importorskip("peft")
    stock = fingerprint(model, tokenizer)
    torch.manual_seed(0)
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()
    seen = [fingerprint(tuned, tokenizer)]
    next(m for m in tuned.modules() if hasattr(m, "lora_A")).scaling["default"] *= 2
    seen.append(fingerprint(tuned, tokenizer))
    with tuned.disable_adapter():
        seen.append(fingerprint(tuned, tokenizer))
    seen.append(fingerprint(tuned.merge_and_unload(), tokenizer))
    assert len({json.dumps(one) for one in [stock, *seen]}) == 5


def test_weights_trained_again_in_the_same_folder_are_another_model(model, tokenizer, tmp_path):
    """Issue 20, point 11: name, size and the time of the file are the same."""
    file = tmp_path / "r.json"
    compare(model, tokenizer, asked(), texts=TEXT, file=file, name="same")
    before = file.read_bytes()
    model.model.layers[0].mlp.up_proj.weight.data[3, 3] += 0.5
    with pytest.raises(ConfigError, match=r"r\.json holds results of another model \(other weights\): .* --overwrite"):
        compare(model, tokenizer, asked(), texts=TEXT, file=file, name="same")
    assert file.read_bytes() == before
    (row,) = compare(model, tokenizer, asked(), texts=TEXT, file=file, name="same", overwrite=True)["rows"]
    assert row["ppl"] != json.loads(before)["rows"][0]["ppl"]


def test_the_same_model_by_another_name_is_resumed(model, tokenizer, tmp_path):
    (row,) = compare(model, tokenizer, asked(), texts=TEXT, file=tmp_path / "r.json", name="here")["rows"]
    assert compare(model, tokenizer, asked(), texts=TEXT, file=tmp_path / "r.json", name="there")["rows"] == [row]


def test_a_file_of_an_earlier_version_is_refused_in_words(model, tokenizer, tmp_path):
    file = tmp_path / "r.json"
    content = compare(model, tokenizer, asked(), texts=TEXT, file=file)
    del content["model"]["fingerprint"]
    with pytest.raises(ConfigError, match="does not record the weights of its model, since an earlier version"):
        check_same(file, content, compare(model, tokenizer, asked(), texts=TEXT))


def test_a_row_names_the_commit_of_the_checkout_that_runs(tmp_path):
    """Not of a checkout around an installed copy, as around a virtual environment; and a + for files that differ."""

    def git(*command):
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        done = subprocess.run(["git", *identity, *command], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    ours, installed = tmp_path / "origin.py", tmp_path / "venv" / "origin.py"
    installed.parent.mkdir()
    for file in (ours, installed):
        file.write_text("1")
        assert commit(file) is None
    commit.cache_clear()
    (tmp_path / ".gitignore").write_text("venv\n")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "one")
    assert commit(ours) == git("rev-parse", "--short", "HEAD")
    assert commit(installed) is None
    commit.cache_clear()
    ours.write_text("2")
    assert commit(ours) == git("rev-parse", "--short", "HEAD") + "+"
    commit.cache_clear()
