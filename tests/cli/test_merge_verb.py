"""`rpe3d merge`: an adapter becomes a checkpoint that carries its law; nothing is overwritten."""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from refusal import refusal

import rpe3d
import tiny_lm
from rpe3d.cli import main
from rpe3d.models.adapters import save_adapter
from rpe3d.models.load import load
from rpe3d.train import Settings, train

pytestmark = pytest.mark.usefixtures("one_thread")
TEXT = r".*language_model.*q_proj"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    place = tmp_path_factory.mktemp("merge")
    (place / "text.txt").write_text("sun moon star " * 100)
    tiny_lm.save(place / "model")
    asked = {"kind": "lm", "model": str(place / "model"), "data": [str(place / "text.txt")], "context": 512}
    quick = {"length": 64, "steps": 2, "batch": 1, "learning_rate": 1e-2, "warmup": 0}
    return train(Settings(**asked, **quick), place / "run", device="cpu")


def test_the_merged_checkpoint_carries_the_law_and_the_change(adapter, tmp_path, capsys):
    out = tmp_path / "merged"
    assert main(["merge", str(adapter), "--out", str(out), "--dtype", "float32"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith(f"wrote {out}: `import rpe3d`")
    merged, base = (load(str(path), device="cpu") for path in (out, adapter.parents[1] / "model"))
    law = rpe3d.law_of(merged.model)
    assert (law.name, law.context) == ("3d-rpe", 512)
    assert merged.tokenizer.model_max_length == 512
    changed = {
        name.split(".")[-2]
        for (name, a), b in zip(merged.model.named_parameters(), base.model.parameters(), strict=True)
        if not torch.equal(a, b)
    }
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj"}
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert refusal(capsys, "merge", adapter, "--out", out)[:2] == (1, f"{out} already exists")
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before


def test_the_weights_are_rounded_once_by_default(adapter, tmp_path):
    assert main(["merge", str(adapter), "--out", str(tmp_path / "m")]) == 0
    rounded = load(str(tmp_path / "m"), device="cpu", dtype=torch.float32).model
    weight = rounded.model.layers[0].self_attn.q_proj.weight
    assert torch.equal(weight, weight.to(torch.bfloat16).float())


def test_what_is_no_adapter_is_refused(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    code, problem, _ = refusal(capsys, "merge", tmp_path / "empty", "--out", tmp_path / "m")
    assert (code, problem) == (1, f"{tmp_path / 'empty'} holds no adapter")
    assert not (tmp_path / "m").exists()


def test_a_run_is_told_from_its_adapter(adapter, tmp_path, capsys):
    """`merge runs/a` says which folder was meant; a whole model needs no merging."""
    run = tmp_path / "run"
    shutil.copytree(adapter, run / "adapter")
    _, problem, hint = refusal(capsys, "merge", run, "--out", tmp_path / "m")
    assert (problem, hint) == (f"{run} holds no adapter", f"its adapter is {run / 'adapter'}: pass that folder")
    (run / "run.json").write_text("{}")
    shutil.rmtree(run / "adapter")
    assert "the same `rpe3d train` command resumes it" in refusal(capsys, "merge", run, "--out", tmp_path / "m")[2]
    (run / "model").mkdir()
    assert "needs no merging" in refusal(capsys, "merge", run, "--out", tmp_path / "m")[2]


def test_an_adapter_has_a_card_without_a_path_of_this_machine(adapter, tmp_path, capsys):
    """PEFT writes an empty template with the base's path."""
    card = (adapter / "README.md").read_text()
    assert "More Information Needed" not in card
    assert str(adapter.parent.parent) not in card
    assert "load_adapter(base" in card
    assert "rpe3d merge" in card
    assert main(["merge", str(adapter), "--out", str(tmp_path / "m")]) == 0
    assert "`rpe3d merge` added an adapter" in (tmp_path / "m" / "README.md").read_text()


def test_a_base_of_another_length_is_refused(adapter, tmp_path, capsys):
    from transformers import LlamaConfig, LlamaForCausalLM

    import tiny_lm

    other = LlamaForCausalLM(LlamaConfig(vocab_size=257, **tiny_lm.SIZES | {"max_position_embeddings": 128}))
    other.save_pretrained(tmp_path / "other")
    tiny_lm.tokenizer().save_pretrained(tmp_path / "other")
    code, problem, _ = refusal(capsys, "merge", adapter, "--base", tmp_path / "other", "--out", tmp_path / "m")
    assert code == 1
    assert problem == f"the adapter was trained on a model of 256 positions, but {tmp_path / 'other'} has 128"
    assert not (tmp_path / "m").exists()


def test_an_adapter_that_is_not_there_is_said_to_be_missing(tmp_path, capsys):
    code, said, _ = refusal(capsys, "merge", tmp_path / "nothing", "--out", tmp_path / "out")
    assert (code, said) == (1, f"there is no folder {tmp_path / 'nothing'}")


def test_other_weights_than_the_adapter_was_trained_on_are_named(adapter, tmp_path, capsys):
    """A reviewer merged into another model of the same shapes, and nothing was said."""
    other = tiny_lm.save(tmp_path / "other")
    model = load(str(other), device="cpu", dtype=torch.float32).model
    torch.nn.init.normal_(model.model.layers[0].mlp.down_proj.weight)
    model.save_pretrained(other)
    assert main(["merge", str(adapter), "--base", str(other), "--out", str(tmp_path / "m")]) == 0
    told = f"note: the files of {other} are not those that the adapter was trained on: merging anyway\n"
    assert told in capsys.readouterr().err
    assert main(["merge", str(adapter), "--out", str(tmp_path / "same")]) == 0
    assert "not those" not in capsys.readouterr().err


def test_a_base_of_other_shapes_is_refused_in_a_sentence(adapter, tmp_path, capsys):
    base = load(str(adapter.parents[1] / "model"), device="cpu")
    base.model.config.hidden_size *= 2
    type(base.model)(base.model.config).save_pretrained(tmp_path / "wide")
    base.tokenizer.save_pretrained(tmp_path / "wide")
    code, problem, hint = refusal(capsys, "merge", adapter, "--base", tmp_path / "wide", "--out", tmp_path / "m")
    assert (code, hint) == (1, "pass the model that it was trained on to --base")
    assert problem.startswith(f"the adapter does not fit {tmp_path / 'wide'} (")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("layers", [1, 3])
def test_a_base_of_more_or_fewer_layers_is_refused(adapter, tmp_path, capsys, layers):
    """PEFT leaves out tensors that have no place, and layers without a tensor: a part of the adapter was merged."""
    base = load(str(adapter.parents[1] / "model"), device="cpu")
    base.model.config.num_hidden_layers = layers
    type(base.model)(base.model.config).save_pretrained(tmp_path / "other")
    base.tokenizer.save_pretrained(tmp_path / "other")
    with warnings.catch_warnings(action="ignore"):
        code, problem, hint = refusal(capsys, "merge", adapter, "--base", tmp_path / "other", "--out", tmp_path / "m")
    assert (code, hint) == (1, "pass the model that it was trained on to --base")
    assert problem == f"the adapter does not fit {tmp_path / 'other'}: its tensors are of other layers"
    assert not (tmp_path / "m").exists()


def test_weights_of_an_adapter_that_are_missing_or_damaged_are_said(adapter, tmp_path, capsys):
    copied = tmp_path / "adapter"
    shutil.copytree(adapter, copied)
    file = copied / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    code, problem, _ = refusal(capsys, "merge", copied, "--out", tmp_path / "m")
    assert (code, problem.partition(" (")[0]) == (1, f"{file} is damaged or cut short")
    file.unlink()
    assert refusal(capsys, "merge", copied, "--out", tmp_path / "m")[:2] == (1, f"{copied} has no {file.name}")


def trained(base, folder, settings):
    """Save an adapter of any PEFT settings on a base, with weights as after training; return the unmerged model."""
    model = rpe3d.extend(load(str(base), device="cpu", dtype=torch.float32).model, "dca", context=1024)
    adapted = get_peft_model(model, settings)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    save_adapter(adapted, folder)
    return adapted.eval()


def lora(**changes):
    return LoraConfig(r=4, task_type="CAUSAL_LM", **{"target_modules": ["q_proj"]} | changes)


def assert_merges(place, adapted):
    """Merge the adapter in a place, and compare with the unmerged model."""
    command = ["merge", place / "adapter", "--base", place / "base", "--out", place / "out", "--dtype", "float32"]
    assert main([str(word) for word in command]) == 0
    merged = load(str(place / "out"), device="cpu", dtype=torch.float32).model
    ids = torch.randint(2, 250, (1, 300))
    ids[0, :4] = torch.tensor([3, 4, 5, 3])
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-4)


def refused(capsys, place):
    """Return problem and hint of a merge that must be refused."""
    command = ["merge", place / "adapter", "--base", place / "base", "--out", place / "out"]
    code, problem, hint = refusal(capsys, *command)
    assert code == 1
    assert not (place / "out").exists()
    return problem, hint


CHANGES = {
    "LoRA of the embeddings": ({"target_modules": ["q_proj", "embed_tokens"]}, False),
    "LoRA of the head": ({"target_modules": ["q_proj", "lm_head"]}, False),
    "rows of the head": ({"trainable_token_indices": {"lm_head": [3, 4]}}, False),
    "rows of the embeddings": ({"trainable_token_indices": {"embed_tokens": [3, 4]}}, True),
    "other embeddings": ({"modules_to_save": ["embed_tokens"]}, True),
    "another head": ({"modules_to_save": ["lm_head"]}, True),
    "LoRA of the embeddings, another head": (
        {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]},
        True,
    ),
}
"""Changes of embeddings or head, and whether PEFT merges them rightly where the two are one tensor."""


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PEFT: tied layers, embeddings that are saved
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_embeddings_or_head_are_merged_unless_that_would_change_both(tmp_path, capsys, tied, change):
    """PEFT saves the embeddings beside such an adapter. The oracle is PEFT's unmerged model."""
    changes, right_if_tied = CHANGES[change]
    tiny_lm.save(tmp_path / "base", tie_word_embeddings=tied)
    adapted = trained(tmp_path / "base", tmp_path / "adapter", lora(**changes))
    if tied and not right_if_tied:
        assert refused(capsys, tmp_path)[0].endswith("which are one tensor there")
    else:
        assert_merges(tmp_path, adapted)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PEFT, as above
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen2_vl", "llava", "gemma3"])
def test_whether_embeddings_and_head_are_one_tensor_is_not_asked_of_a_config(tmp_path, capsys, family, tied):
    """The text config of Qwen2-VL does not say it, LLaVA's says no and Gemma 3's yes, whatever the weights are."""
    tiny_lm.save_image_text(tmp_path / "base", family, tied)
    assert_merges(tmp_path, trained(tmp_path / "base", tmp_path / "adapter", lora(target_modules=TEXT)))
    for folder in ("adapter", "out"):
        shutil.rmtree(tmp_path / folder)
    adapted = trained(tmp_path / "base", tmp_path / "adapter", lora(target_modules=f"{TEXT}|lm_head"))
    if tied:
        assert refused(capsys, tmp_path)[0].endswith("which are one tensor there")
    else:
        assert_merges(tmp_path, adapted)


def test_an_adapter_that_changes_no_weights_is_refused_in_a_sentence(tmp_path, capsys):
    """PEFT has no `merge_and_unload` for prompt tuning: the command ended in a traceback."""
    tiny_lm.save(tmp_path / "base")
    settings = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    trained(tmp_path / "base", tmp_path / "adapter", settings)
    problem, hint = refused(capsys, tmp_path)
    assert problem == "an adapter of type PROMPT_TUNING changes no weights, so it cannot be merged"
    assert hint == "load it unmerged (`rpe3d.models.adapters.load_adapter`)"


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PEFT: biases that the base lacks
def test_what_peft_cannot_merge_is_refused_with_its_reason(tmp_path, capsys):
    """The adapter fits its base: another base is no help."""
    tiny_lm.save(tmp_path / "base")
    trained(tmp_path / "base", tmp_path / "adapter", lora(lora_bias=True))
    problem, hint = refused(capsys, tmp_path)
    assert problem.startswith("PEFT cannot merge the adapter (Impossible to merge LoRA with `lora_bias=True`")
    assert hint == "load it unmerged (`rpe3d.models.adapters.load_adapter`)"
