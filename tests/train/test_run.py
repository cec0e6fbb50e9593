"""A run from settings to a folder: what comes out loads under its law, what goes wrong leaves the last good state."""

from __future__ import annotations

import csv
import json
import shutil
import signal
from importlib import import_module

import pytest
import torch
from reading import losses

import rpe3d
from rpe3d.config import ConfigError
from rpe3d.models import load_adapter
from rpe3d.models.load import load
from rpe3d.train import Settings, merge, train
from rpe3d.train.run import law_in_checkpoint
from rpe3d.train.samples import shuffled
from rpe3d.train.trainer import LawTrainer

# PEFT 0.18 takes every Llama for one with tied embeddings.
pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer")
QUICK = {"steps": 2, "batch": 2, "save_every": 1}


def run(asked, out, **given):
    return train(Settings(**asked | QUICK | given), out, device="cpu")


@pytest.fixture
def ids():
    return torch.randint(1, 257, (1, 200))


@pytest.mark.parametrize("method", ["lora", "lora-plus"])
def test_an_adapter_carries_its_law_and_merges_into_a_model_that_does(asked, tmp_path, ids, method, model_folder):
    result = run(asked, tmp_path / "run", method=method)
    assert result == tmp_path / "run" / "adapter"
    law = json.loads((result / "rpe3d.json").read_text())["law"]
    assert (law["name"], law["context"], law["chunk"]) == ("3d-rpe", 512, 16)
    base = load(str(model_folder), device="cpu", with_tokenizer=False).model
    with pytest.raises(ConfigError, match="this base is not under a law"):
        load_adapter(base, result)
    stock = base(ids).logits
    adapted = load_adapter(rpe3d.extend(base, context=512, **asked["parameters"]), result).eval()
    merged = merge(result, dtype=torch.float32)
    assert rpe3d.law_of(merged.model) == rpe3d.make_law(**law)
    assert merged.tokenizer.model_max_length == 512
    with torch.no_grad():
        truth = adapted(ids).logits
        assert torch.allclose(merged.model.eval()(ids).logits, truth, atol=1e-4)
    assert not torch.allclose(truth, stock, atol=1e-3)


def test_tied_embeddings_stay_tied_through_training_going_on_and_merging(asked, tmp_path, ids):
    """SmolLM2's are. A checkpoint is read back on the way."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import tiny_lm

    folder = tmp_path / "tied"
    shutil.copytree(asked["model"], folder, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=257, **tiny_lm.SIZES, tie_word_embeddings=True)).save_pretrained(folder)
    given = {"model": str(folder), "method": "lora-plus"}
    whole = run(asked, tmp_path / "whole", **given)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for name in ("adapter", "checkpoint-2"):
        shutil.rmtree(tmp_path / "cut" / name)
    again = run(asked, tmp_path / "cut", **given)
    name = "adapter_model.safetensors"
    assert (whole / name).read_bytes() == (again / name).read_bytes()
    merged = merge(whole, dtype=torch.float32).model.eval()
    assert merged.get_input_embeddings().weight is merged.get_output_embeddings().weight
    base = load(str(folder), device="cpu", with_tokenizer=False).model
    adapted = load_adapter(rpe3d.extend(base, context=512, **asked["parameters"]), whole).eval()
    with torch.no_grad():
        assert torch.allclose(merged(ids).logits, adapted(ids).logits, atol=1e-4)


def test_lora_plus_trains_embeddings_and_norms_and_lora_does_not(asked, tmp_path):
    from safetensors.torch import load_file

    kinds = {}
    for method in ("lora", "lora-plus"):
        result = run(asked, tmp_path / method, method=method)
        kinds[method] = {name for name in load_file(result / "adapter_model.safetensors") if "lora_" not in name}
    assert not kinds["lora"]
    names = {name.removesuffix(".weight").rpartition(".")[2] for name in kinds["lora-plus"]}
    assert {"embed_tokens", "norm", "input_layernorm", "post_attention_layernorm"} <= names


def test_a_whole_model_can_be_trained_and_goes_on_bit_for_bit(asked, tmp_path, ids, monkeypatch):
    result = run(asked, tmp_path / "whole", method="full")
    step = LawTrainer.training_step
    calls = []

    def interrupted(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    monkeypatch.setattr(LawTrainer, "training_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(asked, tmp_path / "cut", method="full")
    again = run(asked, tmp_path / "cut", method="full")
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    one, two = (load(str(path), device="cpu").model for path in (result, again))
    assert rpe3d.law_of(one) is not None
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize(
    "given",
    [
        {"attention": "s2", "law": "linear", "parameters": {}},
        {"attention": "s2"},
        {"pose": 2, "law": "yarn", "parameters": {}},
        {"law": "3d-rpe-definition", "parameters": {"chunk": 48}},
        {"law": "ntk", "parameters": {}, "pack": True},
        {"micro_batch": 2, "gradient_checkpointing": False, "precision": "bf16", "schedule": "cosine"},
    ],
)
def test_every_way_of_the_papers_comparison_trains(asked, tmp_path, given):
    run(asked, tmp_path / "run", **given)
    assert all(0 < loss < 10 for loss in losses(tmp_path / "run"))


def test_the_log_has_every_step_and_the_plot_is_there(asked, tmp_path):
    run(asked, tmp_path / "run")
    with (tmp_path / "run" / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2"]
    assert all(row["tokens"] == "256" and float(row["tokens_per_second"]) > 0 for row in rows)
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_finished_run_is_not_made_again_and_another_is_refused(asked, tmp_path, monkeypatch):
    result = run(asked, tmp_path / "run")
    monkeypatch.setattr(LawTrainer, "train", lambda *args, **kwargs: pytest.fail("it trained again"))
    assert run(asked, tmp_path / "run", save_every=7) == result
    with pytest.raises(ConfigError, match="holds a run that differs in learning_rate"):
        run(asked, tmp_path / "run", learning_rate=1e-4)


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_batch(asked, tmp_path, monkeypatch):
    compute = LawTrainer.compute_loss

    def broken(self, *args, **kwargs):
        return compute(self, *args, **kwargs) * (torch.nan if self.state.global_step else 1.0)

    monkeypatch.setattr(LawTrainer, "compute_loss", broken)
    with pytest.raises(ConfigError, match=r"the loss is nan at step 2, on .*/\d.txt") as caught:
        run(asked, tmp_path / "run")
    assert "resumes from the last checkpoint" in caught.value.hint
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-1"]


def test_a_full_disk_leaves_the_last_good_checkpoint_and_the_run_goes_on(asked, tmp_path, monkeypatch):
    whole = tmp_path / "whole"
    run(asked, whole)
    save, calls = torch.save, []

    def full(*args, **kwargs):
        calls.append(1)
        if len(calls) == 5:  # the optimizer of the second checkpoint
            raise OSError(28, "No space left on device")
        return save(*args, **kwargs)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(ConfigError, match=r"cannot write the checkpoint of step 2 .*No space left"):
        run(asked, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").glob("*checkpoint-*")] == ["checkpoint-1"]
    assert not list((tmp_path / "run").glob(".unfinished*"))
    monkeypatch.undo()
    run(asked, tmp_path / "run")
    name = "adapter/adapter_model.safetensors"
    assert (tmp_path / "run" / name).read_bytes() == (whole / name).read_bytes()


def test_a_broken_line_is_named_wherever_it_is_met(asked, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"text": "x " * 200}) + '\n{"text": "y\n')
    with pytest.raises(ConfigError, match=r"line 2 of .*a.jsonl is not JSON"):
        run(asked, tmp_path / "run", data=[str(file)], steps=50)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"data": ["/nowhere"]}, "there is no file or folder /nowhere"),
        ({"model": "/nowhere"}, "there is no file or folder /nowhere"),
        ({"parameters": {"reach": 8}}, "reach is 8"),
        ({"kind": "sft"}, "is plain text, without questions and answers"),
        ({"pretrained": 128}, "the law was made for a model of 128 positions, but this one has 256"),
        ({"batch": 3, "micro_batch": 2}, "a batch of 3 cannot be divided"),
        ({"sequence_parallel": 2}, "1 processes cannot be divided into groups of 2"),
    ],
)
def test_what_is_refused_leaves_no_folder_to_trip_over(asked, tmp_path, given, problem):
    with pytest.raises(ConfigError, match=problem):
        run(asked, tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_a_device_that_the_trainer_would_not_use_is_refused(asked, tmp_path):
    with pytest.raises(ConfigError, match="device 'cuda:1' is not known"):
        train(Settings(**asked), tmp_path / "run", device="cuda:1")


def test_a_model_without_the_projections_is_refused(asked, tmp_path):
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    folder = tmp_path / "neox"
    shutil.copytree(asked["model"], folder, ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
    shutil.copy(f"{asked['model']}/tokenizer_config.json", folder)
    GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=257, max_position_embeddings=256, **sizes)).save_pretrained(folder)
    with pytest.raises(ConfigError, match="GPTNeoXForCausalLM has no q_proj") as caught:
        run(asked, tmp_path / "run", model=str(folder))
    assert "--method full" in caught.value.hint


def poisoned(monkeypatch, step):
    """One NaN in the gradient of a step whose loss is finite."""
    train_step = LawTrainer.training_step

    def nan(self, *args, **kwargs):
        loss = train_step(self, *args, **kwargs)
        if self.state.global_step + 1 == step:
            next(p for p in self.model.parameters() if p.grad is not None).grad.view(-1)[0] = torch.nan
        return loss

    monkeypatch.setattr(LawTrainer, "training_step", nan)


def names_in(folder, *patterns):
    return sorted(path.name for pattern in patterns for path in folder.glob(pattern))


def test_a_gradient_that_is_not_finite_stops_the_run_before_the_step_and_it_resumes(asked, tmp_path, monkeypatch):
    name = "adapter/adapter_model.safetensors"
    run(asked, tmp_path / "whole", steps=3)
    poisoned(monkeypatch, 2)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"the gradient of step 2 is not finite, on .*\.txt"):
            run(asked, tmp_path / "run", steps=3)
        assert names_in(tmp_path / "run", "checkpoint-*", "adapter") == ["checkpoint-1"]
    monkeypatch.undo()
    run(asked, tmp_path / "run", steps=3)
    assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_weights_that_are_not_finite_are_not_saved(asked, tmp_path, monkeypatch):
    step = torch.optim.AdamW.step

    def overflow(self, *args, **kwargs):
        step(self, *args, **kwargs)
        self.param_groups[0]["params"][0].data.view(-1)[0] = torch.inf

    monkeypatch.setattr(torch.optim.AdamW, "step", overflow)
    with pytest.raises(ConfigError, match="the weights after step 1, or their optimizer's states, are not finite"):
        run(asked, tmp_path / "run")
    assert names_in(tmp_path / "run", "*checkpoint-*", "adapter") == []


def test_a_base_model_with_a_weight_that_is_not_finite_is_named_not_the_text(asked, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(asked["model"], tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"norm\.weight holds NaN or infinity \(1 of its numbers\)") as caught:
        run(asked, tmp_path / "run", model=str(tmp_path / "model"))
    assert "copy or convert the model's weights again" in caught.value.hint


def truncated(checkpoint):
    file = checkpoint / "optimizer.pt"
    file.write_bytes(file.read_bytes()[:2000])
    return "optimizer.pt is cut short or damaged"


def nan_weight(checkpoint):
    from safetensors.torch import load_file, save_file

    file = checkpoint / "adapter_model.safetensors"
    weights = load_file(file)
    key = sorted(weights)[0]
    weights[key][0, 0] = torch.nan
    save_file(weights, file, metadata={"format": "pt"})
    return f"{key} in adapter_model.safetensors is not finite"


def nan_state(checkpoint):
    file = checkpoint / "optimizer.pt"
    states = torch.load(file)
    states["state"][0]["exp_avg"][0] = torch.nan
    torch.save(states, file)
    return "a state in optimizer.pt is not finite"


def no_place(checkpoint):
    (checkpoint / "place.json").unlink()
    return "place.json is missing"


@pytest.mark.parametrize("damage", [truncated, nan_weight, nan_state, no_place])
def test_a_run_resumes_from_the_last_checkpoint_that_is_sound(asked, tmp_path, damage, monkeypatch):
    """A NaN that was saved stopped every later run; now it costs the steps since the checkpoint before."""
    again, name = tmp_path / "again", "adapter/adapter_model.safetensors"
    whole = run(asked, tmp_path / "whole", steps=3).joinpath("adapter_model.safetensors").read_bytes()
    monkeypatch.setattr("rpe3d.train.run._finish", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        run(asked, again, steps=2)
    monkeypatch.undo()
    why = damage(again / "checkpoint-2")
    said = []
    train(Settings(**asked | QUICK | {"steps": 3}), again, device="cpu", note=said.append)
    assert said[0] == f"checkpoint-2 cannot be used, since {why}: it is now damaged-checkpoint-2"
    assert said[-1] == "resuming from checkpoint-1"
    assert (again / name).read_bytes() == whole
    assert names_in(again, "*checkpoint-*") == ["checkpoint-3", "damaged-checkpoint-2"]


def test_a_start_that_failed_leaves_its_folder_to_the_corrected_command(asked, tmp_path):
    """run.json of a run that made no step refused every command but the wrong one."""
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(ConfigError, match="no document is as long as a window"):
        run(asked, tmp_path / "run", data=[str(short)])
    result = run(asked, tmp_path / "run")
    name = "adapter_model.safetensors"
    assert (result / name).read_bytes() == (run(asked, tmp_path / "fresh") / name).read_bytes()
    assert losses(tmp_path / "run") == losses(tmp_path / "fresh")


def test_a_finished_run_takes_more_steps_bit_for_bit(asked, tmp_path):
    name = "adapter_model.safetensors"
    whole = run(asked, tmp_path / "whole", steps=5, save_every=100)
    for steps in (2, 3, 5):
        result = run(asked, tmp_path / "run", steps=steps, save_every=100)
        assert json.loads((tmp_path / "run" / "run.json").read_text())["finished"] == steps
    assert (result / name).read_bytes() == (whole / name).read_bytes()
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert names_in(tmp_path / "run", "*") == names_in(tmp_path / "whole", "*")
    with pytest.raises(ConfigError, match="already holds 5 steps, but 4 are asked for"):
        run(asked, tmp_path / "run", steps=4)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_run_keeps_the_law_that_it_began_with(asked, tmp_path, method, monkeypatch):
    """run.json has the parameters that were given; defaults of the others may change between two versions."""
    given = {**asked, "method": method, "parameters": {"chunk": 16, "window": 32, "reach": 64}}
    for name in ("FOCUS", "FADE"):
        monkeypatch.setattr(import_module("rpe3d.geometry.laws.bounded"), name, 0.0)
    before = run(given, tmp_path / "run", steps=2)
    monkeypatch.undo()
    began = law_in_checkpoint(before)
    after = run(given, tmp_path / "run", steps=4)
    assert (began.focus, began.fade) == (0.0, 0.0)
    assert law_in_checkpoint(after) == began


def test_more_steps_that_are_killed_do_not_pass_for_finished(asked, tmp_path, monkeypatch):
    """The result of fewer steps is there all the time."""
    name = "adapter_model.safetensors"
    whole = run(asked, tmp_path / "whole", steps=4)
    before = (run(asked, tmp_path / "run", steps=2) / name).read_bytes()
    save = LawTrainer._save_checkpoint

    def killed(self, *args, **kwargs):
        save(self, *args, **kwargs)
        if self.state.global_step == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(LawTrainer, "_save_checkpoint", killed)
    with pytest.raises(KeyboardInterrupt):
        run(asked, tmp_path / "run", steps=4)
    assert (tmp_path / "run" / "adapter" / name).read_bytes() == before
    monkeypatch.undo()
    assert (run(asked, tmp_path / "run", steps=4) / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_that_ends_with_the_last_step_takes_no_more_of_them(asked, tmp_path, schedule):
    """Its learning rate has fallen to zero: more steps would be another run than one asked for at once."""
    run(asked, tmp_path / "run", schedule=schedule)
    with pytest.raises(ConfigError, match=f"holds a run whose {schedule} schedule ends at step 2") as caught:
        run(asked, tmp_path / "run", schedule=schedule, steps=3)
    assert "only a constant schedule" in caught.value.hint


def test_a_line_that_stops_a_run_can_be_mended_and_the_run_resumes(asked, tmp_path):
    """Only what was read until the checkpoint has to be the same; the order of the lines is the shuffled one."""
    file = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": f"{i} sun moon star " * 12}) + "\n" for i in range(12)]
    given = {"data": [str(file)], "steps": 20, "mix": 1, "length": 64}
    last = shuffled(12, asked.get("seed", 0), 0)[-1]
    file.write_text("".join([*lines[:last], '{"text": \n', *lines[last + 1 :]]))
    with pytest.raises(ConfigError, match=f"line {last + 1} of .* is not JSON"):
        run(asked, tmp_path / "run", **given)
    assert names_in(tmp_path / "run", "checkpoint-*")
    file.write_text("".join(lines))
    resumed = run(asked, tmp_path / "run", **given)
    name = "adapter_model.safetensors"
    assert (resumed / name).read_bytes() == (run(asked, tmp_path / "fresh", **given) / name).read_bytes()
    assert losses(tmp_path / "run") == losses(tmp_path / "fresh")


@pytest.mark.parametrize("what", ["data", "model"])
def test_data_or_weights_that_changed_under_their_name_are_another_run(asked, tmp_path, what):
    data, model = (tmp_path / name for name in ("data", "model"))
    shutil.copytree(asked["data"][0], data)
    shutil.copytree(asked["model"], model)
    given = {"data": [str(data)], "model": str(model)}
    run(asked, tmp_path / "run", **given)
    files = {path: path.read_bytes() for path in (data.iterdir() if what == "data" else model.glob("*.safetensors"))}
    for path, content in files.items():
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) if what == "model" else content.replace(b"s", b"S", 1))
    for steps in (2, 3):
        with pytest.raises(ConfigError, match=f"holds a run that differs in {what}_sha256"):
            run(asked, tmp_path / "run", steps=steps, **given)
    for path, content in files.items():
        path.write_bytes(content)
    run(asked, tmp_path / "run", steps=3, **given)
