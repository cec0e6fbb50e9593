"""LaMPE as its authors' own file computes it, recorded: the outside oracle of the law `lampe`.

    git clone https://github.com/scar-on/LaMPE
    python tests/models/lampe.py LaMPE          # writes tests/models/data/lampe.safetensors

The files `llama_sw_map.py`, with two grains, and `llama_cache1.py`, with three, of that folder (recorded: commit
4e3c91f) are run unchanged, in float32 on CPU, as chunkllama.py does with ChunkLlama's: dense attention with its
log-sum-exp stands in for flash-attn. The fitted mapping lengths are recorded as well. q, k and v are those of
chunkllama.py.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from chunkllama import DIM, GROUPS, HEADS, THETA, flat, projections, vectors
from torch import Tensor, nn

FILES = ("llama_sw_map.py", "llama_cache1.py")
DATA = Path(__file__).parent / "data" / "lampe.safetensors"
HEAD, TAIL, STEPS = 12, 10, 3
CASES = {131: 32, 161: 36, 190: 40}
"""Tokens of a prompt, and its mapping length."""
SHORT = 20
"""Tokens of a prompt below two heads."""
FITTED = {"llama2": "llama-2", "llama3": "llama-3", "mistral": "mistral", "llama3.1": "llama-3.1"}
LENGTHS = (2000, 8191, 8192, 16384, 30000, 131072, 500000)


def dense(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: list[int], **_: bool
) -> tuple[Tensor, Tensor, None]:
    """What flash_attn_func gives with return_attn_probs, of [b, t, h, d]; the last query is the last key's."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
    t, s = scores.shape[-2:]
    distance = torch.arange(s - t, s)[:, None] - torch.arange(s)
    hidden = distance < 0 if causal else torch.zeros(t, s, dtype=torch.bool)
    if window_size[0] >= 0:
        hidden |= distance > window_size[0]
    scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v), scores.logsumexp(-1), None


def imported(path: Path) -> ModuleType:
    """One of the authors' files as a module that patches nothing."""
    import transformers.models.llama.modeling_llama  # noqa: F401  before flash-attn seems to be installed

    flash, losses = ModuleType("flash_attn"), ModuleType("flash_attn.losses.cross_entropy")
    flash.flash_attn_func, losses.CrossEntropyLoss = dense, None  # type: ignore[attr-defined]
    flash.flash_attn_with_kvcache = None  # type: ignore[attr-defined]
    sys.modules |= {name: ModuleType(name) for name in ("flash_attn.losses", "flash_attn_2_cuda")}
    sys.modules |= {"flash_attn": flash, losses.__name__: losses}
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Layer(nn.Module):
    """What the authors' forward asks of an attention layer."""

    num_heads, num_key_value_heads, num_key_value_groups = HEADS, GROUPS, HEADS // GROUPS
    head_dim, hidden_size = DIM, HEADS * DIM

    def __init__(self) -> None:
        super().__init__()
        for name, part in projections().items():
            setattr(self, name, part)

    def rotary_emb(self, _: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        theta = THETA ** (-torch.arange(0, DIM, 2) / DIM)
        angles = (positions[..., None].float() * theta).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


def run(module: ModuleType, length: int, mapped: int) -> tuple[Tensor, Tensor]:
    """Outputs [t, h d] of a prompt, and of the tokens decoded after it."""
    layer, hidden = Layer(), torch.cat([flat(x) for x in vectors()], -1)
    config = SimpleNamespace(self_attn=SimpleNamespace(k_proj=SimpleNamespace(weight=torch.zeros(1))))
    cache = module.allocate_inference_cache(1, 256, GROUPS, DIM, [config], torch.float32)[0]
    outs = []
    for start, stop in [(0, length), *((n, n + 1) for n in range(length, length + STEPS))]:
        out, *_ = module.forward(
            layer, hidden[:, start:stop], position_ids=torch.arange(start, stop)[None], past_key_value=cache,
            head=HEAD, tail=TAIL, use_length=mapped,
        )  # fmt: skip
        outs.append(out[0])
    return outs[0], torch.cat(outs[1:])


def record(folder: Path) -> dict[str, Tensor]:
    """Everything that the test compares with, by name."""
    module, fits, found = (*(imported(folder / name) for name in FILES), {})
    for length, mapped in CASES.items():
        found[f"prefill {length}"], found[f"decode {length}"] = run(module, length, mapped)
        found[f"tail prefill {length}"], found[f"tail decode {length}"] = run(fits, length, mapped)
    found["short"] = torch.cat(run(fits, SHORT, 9))
    for theirs, ours in FITTED.items():
        found[ours] = torch.tensor([fits.remap_uselen(length, theirs) for length in LENGTHS])
    return {name: out.contiguous() for name, out in found.items()}


if __name__ == "__main__":
    from safetensors.torch import save_file

    if len(sys.argv) != 2 or not all((Path(sys.argv[1]) / name).is_file() for name in FILES):
        sys.exit("usage: python tests/models/lampe.py FOLDER_OF_A_LAMPE_CHECKOUT")
    with torch.no_grad():
        recorded = record(Path(sys.argv[1]))
    save_file(recorded, DATA)
    print(f"wrote {DATA}: {len(recorded)} tensors, {DATA.stat().st_size // 1024} KiB", file=sys.stderr)
