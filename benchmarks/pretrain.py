"""Small language models trained from scratch under RoPE and the forms of 3D-RPE, and what each has learned.

    python benchmarks/pretrain.py --data FOLDER_OR_ARCHIVE --out DIR
    python benchmarks/pretrain.py --data FOLDER_OR_ARCHIVE --out DIR --laws rope,3d-rpe --seeds 0     # a part
    python benchmarks/pretrain.py --data FOLDER_OR_ARCHIVE --out DIR --laws slow=3d-rpe-definition:phi_base=1.5

The models of a seed start from the same weights and read the same windows in the same order; only the law differs. The
phased forms have chunks of an eighth of the trained length, so that the coordinate of a chunk is learned; the printed
phase, of base 10000, tells the first two chunks from the rest alone, and one of base 1.5 tells all eight apart. Every
tenth document is kept for measuring.

Measured are the loss and its tail, copying by distance and attention by distance, in windows of one, two and four times
the trained length, under the law itself; and, at two and four times, under position interpolation: `linear` for RoPE,
`interpolate=true` for the phased forms (Theorem 1). The RoPE model is also measured under train-free laws, which is the
setting of the paper's Table 4.

The same command resumes where it was stopped, and parts add up: nothing is trained or measured twice. With `--minutes`
it stops at a checkpoint in time, and shows and draws what there is. A model whose rows are all in the CSV needs its
weights no more. Parts may run side by side, each in a folder of its own with the same `--tokenizer`; `--parts` then
takes over their rows.
Writes DIR/pretrain-<device>.csv and .png, DIR/tokenizer.json, and weights into DIR/<law>-<seed>.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import re
import statistics
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from limit import Clock, command
from pretrain_measures import Number, measured
from pretrain_results import INTERPOLATED, Results, draw, show
from rpe3d import extend, files
from rpe3d.cli.arguments import need, size, sizes
from rpe3d.cli.terminal import progress_bar
from rpe3d.config import ConfigError, choice, whole
from rpe3d.evaluate.texts import read_texts
from rpe3d.geometry import LawSpec, parse_laws
from rpe3d.models import facts
from rpe3d.text import DAMAGED
from stamp import stamp

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
USUAL = "rope,3d-rpe-definition,3d-rpe-dual-chunk,3d-rpe"
PHASED = ("3d-rpe-definition", "3d-rpe-dual-chunk")
TRAIN_FREE = (
    "linear",
    "ntk",
    "yarn",
    "dca",
    "3d-rpe",
    *PHASED,
    *(f"{name}{INTERPOLATED}={name}:interpolate=true" for name in PHASED),
)
TOKENIZER = "tokenizer.json"
STATE = "state.safetensors"
CHUNKS = 8  # in the trained length
HELD_OUT = 10  # one document in so many is kept for measuring
TIMES = (1, 2, 4)
MARGIN = 15.0  # seconds to write a checkpoint, the CSV and the plot, or to measure one cell
FLOPS = 0.4 * 790e12  # a second: 40 % of an H200's dense bf16


@dataclass(frozen=True, kw_only=True)
class Size:
    """The shape of a model, and how it is trained by default."""

    hidden: int
    layers: int
    heads: int
    inner: int
    vocabulary: int
    length: int
    tokens: int
    batch: int
    windows: int


SIZES = {
    "tiny": Size(
        hidden=32, layers=2, heads=2, inner=64, vocabulary=320, length=64, tokens=4096, batch=4, windows=2
    ),  # for tests: it learns nothing
    "small": Size(
        hidden=512, layers=8, heads=8, inner=1408, vocabulary=8192, length=1024, tokens=10**8, batch=64, windows=32
    ),
    "medium": Size(
        hidden=640, layers=8, heads=10, inner=1728, vocabulary=8192, length=2048, tokens=10**8, batch=32, windows=32
    ),
}


def new_model(shape: Size, length: int, seed: int) -> Any:
    """Return a Llama of this shape with weights of this seed, on the device, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(DEVICE)


def estimate(shape: Size, weights: int, length: int, tokens: int) -> float:
    """Return the minutes of one training run on an H200: 6 N and causal attention a token, at 40 % of its peak."""
    return tokens * 6 * (weights + shape.layers * shape.hidden * length) / FLOPS / 60


# --- texts


def documents(path: Path) -> dict[str, str]:
    """Read the texts of a folder, or of a .tar archive, which may be compressed, by name."""
    if path.is_dir():
        paths = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
        texts = {str(file.relative_to(path)): read_texts([file])[0].content for file in paths}
    else:
        try:
            with tarfile.open(path) as archive:
                # In the archive's own order: to go back, a compressed archive is unpacked again from its beginning.
                found = {m.name: archive.extractfile(m).read() for m in archive if m.isfile()}  # type: ignore[union-attr]
                texts = {name: found[name].decode("utf-8-sig") for name in sorted(found)}
        except (OSError, tarfile.TarError, UnicodeDecodeError, *DAMAGED) as error:
            raise ConfigError(
                f"cannot read texts from {path} ({error})", "give a folder or a .tar.xz of texts"
            ) from None
    if len(texts) < 2:
        raise ConfigError(f"{path} holds {len(texts)} texts", "give at least two: one is kept for measuring")
    return texts


@dataclass(frozen=True, kw_only=True)
class Data:
    """Tokens to train on, in one row, and those of each document that is kept for measuring."""

    train: Tensor
    held: Sequence[Tensor]

    def batch(self, length: int, rows: int, seed: int, step: int) -> Tensor:
        """Return the windows of a step, whatever steps came before."""
        draw = torch.Generator().manual_seed(10**6 * seed + step)
        starts = torch.randint(len(self.train) - length + 1, (rows, 1), generator=draw).to(self.train.device)
        return self.train[starts + torch.arange(length, device=self.train.device)]

    def windows(self, length: int, count: int) -> Tensor:
        """Return windows to measure on: the documents in turn, each from its beginning on."""
        long = [ids for ids in self.held if len(ids) >= length]
        if not long:
            most = max(map(len, self.held))
            raise ConfigError(
                f"the longest text kept for measuring has {most} tokens, and {length} are needed",
                "lower --length, or give longer texts",
            )
        whole_ones = [ids[at : at + length] for at in range(0, max(map(len, long)), length) for ids in long]
        return torch.stack([window for window in whole_ones if len(window) == length][:count])


def prepare(texts: Mapping[str, str], vocabulary: int, out: Path) -> Data:
    """Return the texts as tokens of a byte-level BPE, trained on them once and kept in the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    held = [text for i, text in enumerate(texts.values()) if i % HELD_OUT == 0]
    learned = [text for i, text in enumerate(texts.values()) if i % HELD_OUT]
    place = out / TOKENIZER
    if not place.exists():
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
        )
        made.train_from_iterator(learned, trainer)
        files.write_text(place, made.to_str())
    tokenizer = Tokenizer.from_file(str(place))
    rows = [torch.tensor([*one.ids, 0]) for one in tokenizer.encode_batch([*learned, *held])]
    return Data(train=torch.cat(rows[: len(learned)]).to(DEVICE), held=rows[len(learned) :])


# --- training


def trained(model: Any, data: Data, place: Path, seed: int, given: argparse.Namespace, clock: Clock) -> list[float]:
    """Train a model under its law, from the last checkpoint on; returns the loss of every step."""
    steps = given.tokens // (given.batch * given.length)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=given.learning_rate, betas=(0.9, 0.95), fused=DEVICE == "cuda")
    curve = torch.zeros(steps, device=DEVICE)
    begun = resume(model, optimizer, curve, place)
    warmup = max(1, steps // 20)
    since = time.perf_counter()
    model.train()
    with progress_bar() as progress:
        for step in range(begun, steps):
            rate = min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / steps))
            for group in optimizer.param_groups:
                group["lr"] = given.learning_rate * rate
            rows = data.batch(given.length, given.batch, seed, step)
            with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
                loss = model(rows, labels=rows, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            curve[step] = loss.detach()
            seen = (step + 1) % 50 == 0 or step + 1 == steps
            if seen:
                progress(f"{place.name}, loss {curve[step].item():.3f}", step + 1, steps)
            saved = (step + 1) % given.save_every == 0 or step + 1 == steps
            if saved or (seen and clock.over(MARGIN)):
                save(model, optimizer, curve, step + 1, place)
                clock.check(MARGIN)
    model.eval()
    if steps > begun:
        rate = (steps - begun) * given.batch * given.length / (time.perf_counter() - since)
        print(f"{place.name}: {rate:,.0f} tokens a second; loss in the end {curve[-1].item():.4f}", flush=True)
    return curve.tolist()


def save(model: Any, optimizer: Any, curve: Tensor, step: int, place: Path) -> None:
    """Write a checkpoint that replaces the one before; refuse a loss that is not finite."""
    from safetensors.torch import save as packed

    if not curve[:step].isfinite().all():
        raise ConfigError(f"{place.name}: a loss before step {step} is not finite", "lower --learning-rate")
    kept = {"curve": curve}
    for name, weight in model.named_parameters():
        state = optimizer.state[weight]
        kept |= {f"weight.{name}": weight, f"mean.{name}": state["exp_avg"], f"square.{name}": state["exp_avg_sq"]}
    tensors = {name: value.detach().cpu().contiguous() for name, value in kept.items()}
    with files.refusing(f"cannot write {place}", "make room; the same command resumes from the last checkpoint"):
        place.mkdir(parents=True, exist_ok=True)
        files.write_bytes(place / STATE, packed(tensors, metadata={"step": str(step)}))


def resume(model: Any, optimizer: Any, curve: Tensor, place: Path) -> int:
    """Bring a model and its optimizer to the last checkpoint; returns the number of its step, 0 without one."""
    from safetensors import SafetensorError, safe_open

    path = place / STATE
    if not path.exists():
        return 0
    try:
        with safe_open(path, "pt") as kept, torch.no_grad():
            step = int(kept.metadata()["step"])
            curve.copy_(kept.get_tensor("curve"))
            for name, weight in model.named_parameters():
                weight.copy_(kept.get_tensor(f"weight.{name}"))
                optimizer.state[weight] = {
                    "step": torch.tensor(float(step), device=DEVICE),
                    "exp_avg": kept.get_tensor(f"mean.{name}").to(DEVICE),
                    "exp_avg_sq": kept.get_tensor(f"square.{name}").to(DEVICE),
                }
    except (SafetensorError, RuntimeError) as error:
        raise ConfigError(f"cannot resume from {path} ({error})", f"remove {place}: it is trained anew") from None
    return step


# --- what is measured


def learned_law(spec: LawSpec, length: int) -> LawSpec:
    """Return the law that a model is trained under: a phased form with chunks shorter than the trained length."""
    if spec.name in PHASED and "chunk" not in spec.parameters:
        return LawSpec(label=spec.label, name=spec.name, parameters={**spec.parameters, "chunk": length // CHUNKS})
    return spec


def cells(spec: LawSpec, length: int) -> list[tuple[LawSpec, int]]:
    """Return the laws and lengths that a model trained under a law is measured at."""
    beyond: list[LawSpec] = []
    if spec.name == "rope":
        beyond = parse_laws(",".join(TRAIN_FREE))
    elif spec.name in PHASED:
        parameters = {**spec.parameters, "interpolate": True}
        beyond = [LawSpec(label=f"{spec.label}{INTERPOLATED}", name=spec.name, parameters=parameters)]
    own = [(spec, times * length) for times in TIMES]
    return own + [(other, times * length) for other in beyond for times in TIMES[1:]]


def work(specs: Sequence[LawSpec], data: Data, given: argparse.Namespace, results: Results, clock: Clock) -> None:
    """Train and measure, a seed after the other, each model as far as it is not done yet."""
    for seed in given.seeds:
        for spec in specs:
            every = cells(spec, given.length)
            missing = [c for c in every if results.lacks(spec.label, seed, c[0].label, c[1])]
            if not missing:
                continue
            clock.check(MARGIN)
            name = re.sub(r"[^\w.-]+", "-", spec.label)
            place = given.out / f"{name}-{seed}"
            if not (place / STATE).exists():
                results.forget(spec.label, seed)
                missing = every
            model = new_model(given.shape, given.length, seed)
            known = facts(model)
            extend(model, spec.at(given.length, known))
            curve = trained(model, data, place, seed, given, clock)
            about = {"law": spec.label, "seed": seed, "weights": model.num_parameters(), "trained": given.length}
            about["tokens"] = len(curve) * given.batch * given.length
            for applied, length in missing:
                clock.check(MARGIN)
                extend(model, applied.at(length, known))
                windows = data.windows(length, given.shape.windows).to(DEVICE)
                with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
                    numbers = measured(model, windows, given.length)
                if (applied, length) == (spec, given.length):
                    numbers += train_losses(curve)
                results.add({**about, "applied": applied.label, "length": length}, numbers)
            del model


def train_losses(curve: Sequence[float], points: int = 20) -> list[Number]:
    """Return the mean training loss of each twentieth of the steps, at its last step."""
    ends = sorted({max(1, len(curve) * i // points) for i in range(1, points + 1)})
    parts = [(end, curve[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
    return [Number("train_loss", end, statistics.fmean(part), len(part)) for end, part in parts]


def bring(tokenizer: Path | None, place: Path) -> None:
    """Put a tokenizer of an earlier run into the folder; refuse another than is there."""
    if tokenizer is None:
        return
    with files.refusing(f"cannot read {tokenizer}", "give --tokenizer the tokenizer.json of an earlier run"):
        text = tokenizer.read_text(encoding="utf-8")
    if place.exists() and place.read_text(encoding="utf-8") != text:
        raise ConfigError(f"{place.parent} holds another tokenizer than {tokenizer}", "give --out a new folder")
    files.write_text(place, text)


def take_over(part: Path, out: Path, results: Results) -> None:
    """Add the rows of a part that was run in another folder, where they are not there yet."""
    from rpe3d.train import folder

    if folder.asked_before(part) != folder.asked_before(out):
        raise ConfigError(f"{part} holds no part of this run", "give folders of the same data, size and tokens")
    with files.refusing(f"{part} is not a finished part", "run it again, or leave it out"):
        same = (part / TOKENIZER).read_bytes() == (out / TOKENIZER).read_bytes()
    if not same:
        raise ConfigError(f"{part} has another tokenizer", "run parts with the same --tokenizer")
    there = Results(part / results.path.name, {}).rows
    results.take(
        [row for row in there if results.lacks(row["law"], int(row["seed"]), row["applied"], int(row["length"]))]
    )


# --- the command


def asked(given: argparse.Namespace, texts: Mapping[str, str]) -> dict[str, Any]:
    """Return what all rows of a folder share."""
    kept = {key: getattr(given, key) for key in ("size", "length", "tokens", "batch", "learning_rate")}
    digest = hashlib.sha256("\0".join(texts.values()).encode()).hexdigest()
    return {**kept, "device": DEVICE, "texts": digest}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="a folder of texts, or a .tar archive of them")
    parser.add_argument("--out", type=Path, required=True, help="a folder of its own, for CSV, plot and weights")
    parser.add_argument("--laws", default=USUAL, help=f"laws to train under; default {USUAL}")
    parser.add_argument("--seeds", type=sizes, default="0,1,2", help="default 0,1,2")
    parser.add_argument("--size", default="small", help=f"of {', '.join(SIZES)}; default small, 30 million weights")
    parser.add_argument("--length", type=size, help="tokens in a training window; default 1k (small), 2k (medium)")
    parser.add_argument("--tokens", type=int, help="tokens to train on; default 100 million")
    parser.add_argument("--batch", type=int, help="windows in a step; default 64 (small), 32 (medium)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="default 1e-3")
    parser.add_argument("--save-every", type=int, default=500, help="steps between checkpoints; default 500")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json of an earlier run; default: one is trained")
    parser.add_argument(
        "--parts", type=Path, nargs="+", default=[], help="folders of parts of this run: take their rows"
    )
    parser.add_argument("--minutes", type=float, help="stop cleanly before so many minutes are over, with status 3")
    given = parser.parse_args()
    given.shape = SIZES[choice("size", given.size, SIZES)]
    for key in ("length", "tokens", "batch"):
        value = getattr(given, key)
        setattr(given, key, getattr(given.shape, key) if value is None else whole(key, value))
    whole("save-every", given.save_every)
    whole("length", given.length, least=64)
    whole("tokens", given.tokens, least=given.batch * given.length)
    return given


def main() -> int:
    given = arguments()
    clock = Clock(given.minutes)
    need("train", "transformers", "tokenizers", "safetensors", "rich", "matplotlib")
    from rpe3d.train import folder

    specs = [learned_law(spec, given.length) for spec in parse_laws(given.laws)]
    blank = new_model(given.shape, given.length, 0)
    known = facts(blank)
    for spec in specs:  # wrong ones are refused before any work
        for applied, length in cells(spec, given.length):
            applied.at(length, known)
    texts = documents(given.data)
    weights = blank.num_parameters()
    minutes = estimate(given.shape, weights, given.length, given.tokens)
    runs = len(specs) * len(given.seeds)
    print(
        f"{weights / 1e6:.1f} million weights, {given.tokens / 1e6:.1f} million tokens: about {minutes:.1f} minutes "
        f"a run on an H200 at 40 % of its peak, {runs * minutes:.1f} for {runs} runs, measuring aside",
        file=sys.stderr,
        flush=True,
    )
    del blank
    origin = stamp(cuda=DEVICE == "cuda")
    origin["recipe"] = origin["recipe"].replace(f" {given.data}", f" {given.data.resolve().name}")
    with folder.locked(given.out):
        folder.check_run(given.out, asked(given, texts))
        folder.write_json(given.out / folder.ASKED, asked(given, texts))
        bring(given.tokenizer, given.out / TOKENIZER)
        try:
            data = prepare(texts, given.shape.vocabulary, given.out)
            data.windows(max(TIMES) * given.length, 1)
        except ConfigError:  # the corrected command may come here
            for name in (folder.ASKED, TOKENIZER):
                (given.out / name).unlink(missing_ok=True)
            raise
        results = Results(given.out / f"pretrain-{DEVICE}.csv", origin)
        for part in given.parts:
            take_over(part, given.out, results)
        with clock.limited():
            work(specs, data, given, results, clock)
        if results.rows:
            show(results.rows)
            draw(results.rows, given.length, results.path.with_suffix(".png"))
    return clock.status()


if __name__ == "__main__":
    command(main)
