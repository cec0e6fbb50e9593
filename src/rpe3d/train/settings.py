"""Settings of a training run, validated as one value. The defaults are the paper's ("Training Setting")."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpe3d.config import ConfigError, choice, flag, freeze, known_keys, real, whole

if TYPE_CHECKING:
    from rpe3d.geometry import LawSpec

KINDS = {"lm": 1000, "sft": 3000}
"""Kinds of training, and the paper's number of steps for each."""
METHODS = ("lora", "lora-plus", "full")
SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
ATTENTIONS = ("full", "s2")
PRECISIONS = ("bf16", "fp32")
FREE = ("micro_batch", "sequence_parallel", "gradient_checkpointing", "save_every", "tensorboard")
"""Settings that may change when a run resumes: they affect speed and memory, and the result at most by rounding."""


HELP, TOKENS = "help", "tokens"
"""Keys of a field's metadata: its text in `rpe3d train --help`, and whether it is a number of tokens such as 32k."""


def option(text: str, default: Any = MISSING, *, tokens: bool = False) -> Any:
    """Return a field that is also an option of `rpe3d train`; {default} in its help stands for the default."""
    shown = f"{default:g}".replace("e-0", "e-") if isinstance(default, float) else str(default)
    return field(default=default, metadata={HELP: text.replace("{default}", shown), TOKENS: tokens})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a training run: model, law, data and method. Lengths are in tokens."""

    kind: str
    model: str
    context: int = option("target context length, e.g. 32k", tokens=True)
    data: Sequence[str] = option("text files, folders, .jsonl or .json files, or the name of a dataset")
    law: str = "3d-rpe"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the law that differ from its defaults."""
    pretrained: int | None = None
    """Pretrained length that the parameters were made for, if known."""
    split: str = option("split of a dataset; default {default}; train[:20000] takes a part", "train")
    text_field: str = option("field of a record that holds its text; default {default}", "text")
    pack: bool = option("join documents with end-of-text tokens; otherwise a window holds one document", False)
    mix: int = option("documents to draw windows from in turn; default {default}", 16)
    length: int | None = option(
        "tokens per window, or at most per conversation; default: the context", None, tokens=True
    )
    steps: int | None = option(
        f"training steps; default {KINDS['lm']} (lm) or {KINDS['sft']} (sft); more steps continue a finished run", None
    )
    batch: int = option("windows per step, over all processes; default {default}", 8)
    micro_batch: int = option("windows per forward pass; default {default}", 1)
    method: str = option("lora (default), lora-plus (also embeddings and norms, as in LongLoRA), or full", "lora")
    rank: int = option("rank of LoRA; default {default}", 8)
    alpha: int = option("alpha of LoRA; default {default}", 16)
    learning_rate: float = option("learning rate of AdamW; default {default}", 2e-5)
    beta1: float = option("beta1 of AdamW; default {default}", 0.9)
    beta2: float = option("beta2 of AdamW; default {default}", 0.95)
    weight_decay: float = option("weight decay of AdamW; default {default}", 0.0)
    clip: float = option("maximum gradient norm; default {default}", 1.0)
    schedule: str = option("after the warm-up: constant (default), linear or cosine", "constant")
    warmup: int = option("steps of linear warm-up; default {default}", 20)
    attention: str = option("full (default), or s2: LongLoRA's shifted sparse attention while training", "full")
    pose: int = option("PoSE: skip positions, up to the context, between N parts of a window; its paper has 2", 0)
    sequence_parallel: int = option("processes that share one sequence; default {default}", 1)
    precision: str | None = option("bf16 (default on a GPU) or fp32 (default on a CPU)", None)
    gradient_checkpointing: bool = option("use less memory and a third more time; default on", True)
    seed: int = option("seed of the data order and the adapter's initial weights; default {default}", 0)
    save_every: int = option("steps between checkpoints; default {default}", 100)
    tensorboard: bool = option("write a TensorBoard log into the run's folder", False)

    def __post_init__(self) -> None:
        kind = choice("kind", self.kind, KINDS)
        _ = self.spec  # refuses an unknown law or parameter
        context = whole("context", self.context)
        length = context if self.length is None else whole("length", self.length, least=2)
        freeze(
            self,
            context=context,
            length=length,
            data=tuple(str(name) for name in self.data),
            parameters=dict(self.parameters),
            pack=flag("pack", self.pack),
            pretrained=None if self.pretrained is None else whole("pretrained", self.pretrained),
            steps=KINDS[kind] if self.steps is None else whole("steps", self.steps),
            **{name: whole(name, getattr(self, name)) for name in ("mix", "batch", "micro_batch", "rank", "alpha")},
            **{name: whole(name, getattr(self, name)) for name in ("sequence_parallel", "save_every")},
            **{name: whole(name, getattr(self, name), least=0) for name in ("warmup", "seed", "pose")},
            **{name: real(name, getattr(self, name), above=True) for name in ("learning_rate", "clip")},
            **{name: real(name, getattr(self, name)) for name in ("beta1", "beta2", "weight_decay")},
            method=choice("method", self.method, METHODS),
            schedule=choice("schedule", self.schedule, SCHEDULES),
            attention=choice("attention", self.attention, ATTENTIONS),
            precision=None if self.precision is None else choice("precision", self.precision, PRECISIONS),
            gradient_checkpointing=flag("gradient_checkpointing", self.gradient_checkpointing),
            tensorboard=flag("tensorboard", self.tensorboard),
        )
        self._check_together(length)

    def _check_together(self, length: int) -> None:
        if not self.data:
            raise ConfigError("no data is given", "pass files, folders or the name of a dataset to --data")
        for name in ("beta1", "beta2"):
            if getattr(self, name) >= 1:
                raise ConfigError(f"{name} is {getattr(self, name):g}, not below 1", f"choose {name} in [0, 1)")
        if length > self.context:
            raise ConfigError(f"length is {length}, above the context {self.context}", "lower length, or raise context")
        if self.kind == "lm" and length % self.sequence_parallel:
            raise ConfigError(
                f"windows of {length} tokens cannot be shared by {self.sequence_parallel} processes",
                "change length or sequence_parallel",
            )
        if self.pose == 1 or self.pose > length:
            raise ConfigError(f"pose is {self.pose}", "choose at least 2, as in PoSE's paper, and at most the length")
        if self.pose and self.kind == "sft":
            raise ConfigError("pose would also skip positions inside answers", "use it with `lm`")
        if self.pose and length == self.context:
            raise ConfigError("pose has no positions to skip to", "choose a length below the context")
        if self.attention == "s2" and length < 8:
            raise ConfigError(f"length is {length}, too short for the four groups of s2", "raise length")
        if self.attention == "s2" and (self.pose or self.sequence_parallel > 1):
            raise ConfigError("s2 cannot be combined with pose or sequence_parallel", "leave one of them out")

    @property
    def spec(self) -> LawSpec:
        """The requested law, before there is a model to make it for."""
        from rpe3d.geometry import LawSpec  # loads torch, which the options of the command line do without

        return LawSpec(label="the law", name=self.law, parameters=self.parameters, pretrained=self.pretrained)

    @property
    def window(self) -> int:
        """Tokens in a window."""
        assert self.length is not None
        return self.length

    @property
    def total_steps(self) -> int:
        assert self.steps is not None
        return self.steps

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a recipe stores them."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**values, "data": list(self.data)}


def recipes() -> dict[str, Any]:
    """Return the files of the recipes that ship with rpe3d, by name."""
    found = [file for file in (files("rpe3d.train") / "recipes").iterdir() if file.name.endswith(".json")]
    return {file.name.removesuffix(".json"): file for file in sorted(found, key=lambda file: file.name)}


def read_recipe(given: Path) -> dict[str, Any]:
    """Read the keywords of `Settings` from a recipe: a file, or the name of one that ships with rpe3d.

    `about`, the title of a recipe, is left out.
    """
    hint = "pass a JSON file, or the name of a recipe that ships with rpe3d"
    path: Any = given
    if not given.exists() and given.parent == Path() and given.suffix != ".json":
        path = recipes()[choice("recipe", str(given), recipes())]
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the recipe {path}: {error.strerror}", hint) from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error})", hint) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a recipe", hint)
    content.pop("about", None)
    known_keys(f"the recipe {path.name}", content, [f.name for f in fields(Settings)])
    return content
