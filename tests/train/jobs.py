"""Training runs in processes of their own, forked from one that has imported everything.

A job: {"settings", "out", "processes": 1, "kill": null, ["forward", n], ["rename", n] or ["event", n]}: kill -9 at the
n-th forward, when the n-th checkpoint is written but has not its name yet, or at the n-th of all forwards, writes and
renames. "nan": [rank, step] puts a NaN into the gradient that a process has for a step. "say" names a file for what is
refused. "minutes" is given to `train`. "config" names a configuration of `accelerate launch`, whose environment the
processes get.
Or {"check": "ulysses" or "sharded", "processes": 2}, or {"copy": [from, to]}.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
from importlib import import_module
from itertools import islice
from pathlib import Path

import torch

from launched import free_port
from rpe3d.config import ConfigError
from rpe3d.train import OutOfTime, Settings, folder, run, sound, train
from rpe3d.train.attention import TrainingAttention, training_attention
from rpe3d.train.trainer import LawTrainer
from rpe3d.train.ulysses import sequence_parallel

LATER = ("accelerate.commands.launch", "matplotlib.figure", "matplotlib.backends.backend_agg")
"""What a run imports when it needs it, here once for all of them."""


def killed_at(owner, name, count):
    function, calls = getattr(owner, name), []

    def counted(*args, **kwargs):
        calls.append(name)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    setattr(owner, name, counted)


def killed_at_event(count):
    """At whatever comes n-th: a forward, a file (of which half is written by then), a rename, a removal."""
    calls = []

    def counted(function, half=False):
        def event(*args, **kwargs):
            calls.append(function)
            if len(calls) == count:
                if half:
                    function(*args, **kwargs)
                    os.truncate(args[1], os.path.getsize(args[1]) // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return event

    torch.save = counted(torch.save, half=True)
    for owner, name in (
        (LawTrainer, "training_step"), (LawTrainer, "_save"), (run, "save_trained"), (folder, "write"),
        (os, "rename"), (os, "replace"), (os, "fsync"), (shutil, "rmtree"),
    ):  # fmt: skip
        setattr(owner, name, counted(getattr(owner, name)))


def nan_at(step):
    """One NaN in a gradient, with a loss that is finite."""
    train_step = LawTrainer.training_step

    def broken(self, *args, **kwargs):
        loss = train_step(self, *args, **kwargs)
        if self.state.global_step + 1 == step:
            mine = (sound._local(p.grad) for p in self.model.parameters() if p.grad is not None)
            for part in islice((part for part in mine if part.numel()), 1):  # FSDP has none before the last forward
                part.view(-1)[0] = torch.nan
        return loss

    LawTrainer.training_step = broken


def work(job, rank, port):
    torch.set_num_threads(1)
    count = job.get("processes", 1)
    if count > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if "config" in job:
        os.environ |= launched(job["config"])
        all_divided()
    if "check" in job:
        torch.distributed.init_process_group("gloo")
        {"ulysses": ulysses, "sharded": sharded}[job["check"]]()
        return 0
    if job.get("nan") and job["nan"][0] == rank:
        nan_at(job["nan"][1])
    if (kill := job.get("kill")) and kill[0] == "event":
        killed_at_event(kill[1])
    elif kill:
        killed_at(*{"forward": (LawTrainer, "training_step"), "rename": (folder, "settle")}[kill[0]], kill[1])
    try:
        train(Settings(**job["settings"]), Path(job["out"]), device="cpu", minutes=job.get("minutes"))
    except OutOfTime:
        return 3
    except ConfigError as error:
        print(error, file=sys.stderr)
        if "say" in job:
            Path(job["say"]).write_text(str(error))
        return 1
    finally:
        sys.stderr.flush()
    return 0


def launched(config):
    """The environment that `accelerate launch --config_file config` gives to its processes."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    given, *_ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", config, "script"]))
    return prepare_multi_gpu_env(given)


def all_divided():
    """Before every step no process holds all of a weight, but for one that cannot be divided among so many."""
    from torch.distributed.tensor import DTensor, Shard

    check_step = LawTrainer.check_step

    def checked(self):
        weights = dict(self.model.named_parameters())
        assert weights
        assert all(isinstance(w, DTensor) and w.placements == (Shard(0),) for w in weights.values())
        check_step(self)

    LawTrainer.check_step = checked


def small_model():
    """Four heads over one key head, under a law."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import rpe3d

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, initializer_range=0.3, **sizes, **heads)).train()
    return rpe3d.extend(model, context=256, chunk=8, window=16, reach=32, focus=0, fade=0)


def learned(model, ids, labels, **given):
    """The summed loss of a forward, with its backward done."""
    loss = model(input_ids=ids, labels=labels, shift_labels=labels, num_items_in_batch=1, **given).loss
    loss.backward()
    return loss.detach()


def close(a, b, what):
    error = float((a - b).norm() / b.norm())
    assert error < 1e-5, (what, error)


def whole():
    """One process's model after a backward, its loss, and the tokens."""
    model = small_model()
    ids = torch.randint(0, 97, (2, 120), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(-1, 1)
    with training_attention(model, TrainingAttention()):
        loss = learned(model, ids, labels)
    return model, loss, ids, labels


def ulysses():
    """Slices of the same sequences: the losses add up, and so do the gradients."""
    alone, loss, ids, labels = whole()
    shared = sequence_parallel(2)
    model = small_model()
    positions = torch.arange(120).expand(2, -1)
    for skips in (False, True):  # positions that do not skip, given as those that may
        model.zero_grad()
        with training_attention(model, TrainingAttention(parallel=shared, skipping=skips)):
            mine = learned(model, *map(shared.slice, (ids, labels)), position_ids=shared.slice(positions))
        torch.distributed.all_reduce(mine)
        close(mine, loss, "loss")
        for (name, parameter), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.distributed.all_reduce(parameter.grad)
            close(parameter.grad, other.grad, name)


def sharded():
    """Every process a row of the batch, and its part of every parameter."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    alone, loss, ids, labels = whole()
    model, rank, mesh = small_model(), torch.distributed.get_rank(), init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with training_attention(model, TrainingAttention()):
        mine = learned(model, ids[rank : rank + 1], labels[rank : rank + 1])
    torch.distributed.all_reduce(mine)
    close(mine, loss, "loss")
    for (name, parameter), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        close(2 * parameter.grad.full_tensor(), other.grad, name)  # their mean, twice


def main():
    """Jobs come line by line; each is answered with its exit codes."""
    for name in LATER:
        import_module(name)
    gc.freeze()  # a run collects garbage: not all of what was imported, again and again
    for line in sys.stdin:
        print(json.dumps(done(json.loads(line))), flush=True)


def done(job):
    if "copy" in job:
        shutil.copytree(*job["copy"])
        return []
    port, children = free_port(), []
    for rank in range(job.get("processes", 1)):
        child = os.fork()
        if child == 0:
            code = 70
            try:
                code = work(job, rank, port)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


if __name__ == "__main__":
    main()
