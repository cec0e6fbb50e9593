"""Check that numbers are finite: gradients before a step, weights before a save, checkpoints before a run resumes.

All processes of a run reach the same answer, so that none waits for one that has stopped.
"""

from __future__ import annotations

import errno
import json
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rpe3d.config import ConfigError
from rpe3d.train import folder, sharded

NOTES = (folder.PLACE, "trainer_state.json")
STATES = ("optimizer.pt", "scheduler.pt", sharded.WEIGHTS, sharded.OPTIMIZER)


def _local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor that FSDP has divided."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all numbers of all tensors are finite; waits for the device once."""
    checked = [_local(x).isfinite().all() for x in tensors if x.is_floating_point()]
    return not checked or bool(torch.stack([x.to(checked[0].device) for x in checked]).all())


def first_of_all(problem: str | None, device: torch.device) -> str | None:
    """Return the problem of the first process that has one, in every process."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return problem
    some = torch.tensor(float(problem is not None), device=device)
    dist.all_reduce(some, op=dist.ReduceOp.MAX)
    if not some:
        return None
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return next(one for one in problems if one is not None)


def tensors_in(state: Any) -> Iterator[Tensor]:
    """Yield every tensor of a nested state, such as an optimizer's."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors_in(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from tensors_in(value)


def damage(checkpoint: Path) -> str | None:
    """Return what keeps a run from resuming at a checkpoint; None if nothing does."""
    from safetensors import SafetensorError, safe_open

    name = ""
    try:
        for name in NOTES:
            json.loads((checkpoint / name).read_text(encoding="utf-8"))
        for path in sorted(checkpoint.glob("*.safetensors")):
            name = path.name
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  not a dict
                    if not finite([file.get_tensor(key)]):
                        return f"{key} in {name} is not finite"
        for path in (checkpoint / name for name in STATES):
            name = path.name
            if path.exists() and not finite(tensors_in(torch.load(path, map_location="cpu", weights_only=True))):
                return f"a state in {name} is not finite"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        if error.errno == errno.EINVAL:  # torch looks for the end of a file before its beginning
            return f"{name} is cut short or damaged"
        raise ConfigError(f"cannot read {checkpoint / name}: {error.strerror}", "make it readable") from None
    except (ValueError, SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError):
        return f"{name} is cut short or damaged"
    return None


def set_damaged_aside(out: Path, note: Any) -> None:
    """Rename checkpoints that a run cannot resume from, the last first, until one is sound."""
    while (last := folder.last_checkpoint(out)) is not None and (why := damage(last)):
        aside = folder.set_aside(last)
        note(f"{last.name} cannot be used, since {why}: it is now {aside.name}")
