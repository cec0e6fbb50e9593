"""Dual chunk attention as its authors' own file computes it, recorded: the outside oracle of the law `dca`.

    git clone https://github.com/HKUNLP/ChunkLlama
    python tests/models/chunkllama.py ChunkLlama          # writes tests/models/data/chunkllama.safetensors

The file `chunkllama_attn_replace.py` of that folder (recorded: commit 2add4d7) is run unchanged, in float32 on CPU. It
was written for an older transformers and for flash-attn, so what it takes from them stands in here: dense attention
with its log-sum-exp, a cache, a place for the classes that it would patch; and, but for one record, float32 where it
rounds to bfloat16. Nothing of it is kept but its results; q, k and v come from numpy's frozen RandomState, so the test
makes them again.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn

DATA = Path(__file__).parent / "data" / "chunkllama.safetensors"
HEADS, GROUPS, DIM, THETA = 2, 1, 16, 10000.0
PRETRAINED, LONGEST, PROMPT = 64, 200, 24
WINDOW = 3 * PRETRAINED // 4  # the largest position shown
LOCAL = {"": 8, "narrow ": 4}  # local windows: the file's default, L / 8, and ours, which was its first
LENGTHS = (24, 40, 41, 80, LONGEST)  # below, at and above a chunk of 40, two chunks, and five
SCALED = 100  # a length at which the file's temperature is recorded


def vectors() -> tuple[Tensor, Tensor, Tensor]:
    """q [1, h, t, d], k and v [1, g, t, d], float32."""
    draw = np.random.RandomState(0).standard_normal
    q, k, v = (torch.from_numpy(draw((1, n, LONGEST, DIM))).float() for n in (HEADS, GROUPS, GROUPS))
    return q, k, v


def flat(x: Tensor) -> Tensor:
    """[1, h, t, d] as hidden states [1, t, h d]."""
    return x.transpose(1, 2).flatten(2)


class Cut(nn.Module):
    """A projection that takes its part of hidden states that are q, k and v side by side."""

    def __init__(self, start: int, heads: int) -> None:
        super().__init__()
        self.part = slice(start * DIM, (start + heads) * DIM)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden[..., self.part]


def projections() -> dict[str, nn.Module]:
    return {
        "q_proj": Cut(0, HEADS),
        "k_proj": Cut(HEADS, GROUPS),
        "v_proj": Cut(HEADS + GROUPS, GROUPS),
        "o_proj": nn.Identity(),
    }


class Growing:
    """The cache that the file asks for: keys and values, one behind the other."""

    def __init__(self) -> None:
        self.kept: tuple[Tensor, Tensor] | None = None

    def get_usable_length(self, *_: int) -> int:
        return 0 if self.kept is None else self.kept[0].shape[2]

    def update(self, k: Tensor, v: Tensor, *_: int, **__: object) -> tuple[Tensor, Tensor]:
        self.kept = (k, v) if self.kept is None else (torch.cat([self.kept[0], k], 2), torch.cat([self.kept[1], v], 2))
        return self.kept


class Precise:
    """torch with float32 for bfloat16, to which the file rounds the weights of its merge whatever it is given."""

    bfloat16 = torch.float32

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


def dense(q: Tensor, k: Tensor, v: Tensor, causal: bool, **_: bool) -> tuple[Tensor, Tensor, None]:
    """What flash_attn_func gives with return_attn_probs, of [b, t, h, d]: the output and the log-sum-exp [b, h, t]."""
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v), scores.logsumexp(-1), None


def imported(folder: Path) -> ModuleType:
    """The authors' file as a module that patches nothing."""
    import transformers.models.llama.modeling_llama  # noqa: F401  before flash-attn seems to be installed

    flash = ModuleType("flash_attn.flash_attn_interface")
    flash.flash_attn_func, flash.flash_attn_qkvpacked_func = dense, None  # type: ignore[attr-defined]
    sys.modules |= {"flash_attn": ModuleType("flash_attn"), flash.__name__: flash}
    spec = importlib.util.spec_from_file_location("chunkllama", folder / "chunkllama_attn_replace.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    llama = SimpleNamespace(LlamaAttention=SimpleNamespace(), LlamaFlashAttention2=SimpleNamespace())
    models = SimpleNamespace(llama=SimpleNamespace(modeling_llama=llama))
    module.transformers = SimpleNamespace(models=models)  # type: ignore[attr-defined]
    return module


def run(module: ModuleType, lengths: list[int], *, local: int, trained: int = LONGEST, precise: bool = True) -> Tensor:
    """Outputs [t, h d] of tokens up to each length in turn, each call on the cache of those before it."""
    module.torch = Precise() if precise else torch  # type: ignore[attr-defined]
    module.replace_with_chunkllama(PRETRAINED, local)
    patched = module.transformers.models.llama.modeling_llama
    layer = SimpleNamespace(
        **projections(),
        rotary_emb=patched.LlamaRotaryEmbedding(DIM, max_position_embeddings=trained, base=THETA),
        num_heads=HEADS,
        num_key_value_heads=GROUPS,
        num_key_value_groups=HEADS // GROUPS,
        head_dim=DIM,
        hidden_size=HEADS * DIM,
        layer_idx=0,
    )
    hidden, cache, outs = torch.cat([flat(x) for x in vectors()], -1), Growing(), []
    for start, stop in zip([0, *lengths], lengths, strict=False):
        positions = torch.arange(start, stop)[None]
        out, *_ = patched.LlamaAttention.forward(
            layer, hidden[:, start:stop], position_ids=positions, past_key_value=cache
        )
        outs.append(out[0])
    return torch.cat(outs)


def record(folder: Path) -> dict[str, Tensor]:
    """Everything that the test compares with, by name."""
    module, found = imported(folder), {}
    stepwise = list(range(PROMPT, LONGEST + 1))
    for name, local in LOCAL.items():
        for length in LENGTHS if name == "" else (LONGEST,):
            found[f"{name}prefill {length}"] = run(module, [length], local=local)
        found[f"{name}decode"] = run(module, stepwise, local=local)[PROMPT:]
    local = LOCAL[""]
    found["rounded merge"] = run(module, [SCALED], local=local, precise=False)
    found["temperature prefill"] = run(module, [SCALED], local=local, trained=PRETRAINED)
    found["temperature decode"] = run(module, list(range(PROMPT, SCALED + 1)), local=local, trained=PRETRAINED)[PROMPT:]
    return {name: out.contiguous() for name, out in found.items()}


if __name__ == "__main__":
    from safetensors.torch import save_file

    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "chunkllama_attn_replace.py").is_file():
        sys.exit("usage: python tests/models/chunkllama.py FOLDER_OF_A_CHUNKLLAMA_CHECKOUT")
    with torch.no_grad():
        recorded = record(Path(sys.argv[1]))
    DATA.parent.mkdir(exist_ok=True)
    save_file(recorded, DATA)
    print(f"wrote {DATA}: {len(recorded)} tensors, {DATA.stat().st_size // 1024} KiB", file=sys.stderr)
