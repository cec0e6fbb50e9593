"""The model of a verb: where and how it runs, which laws it can take, and what happens to a law it already carries."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rpe3d.cli.terminal import detail, note

if TYPE_CHECKING:
    from rpe3d.geometry import LawSpec

DTYPES = ("float32", "bfloat16", "float16")
MODEL = "a Hugging Face name or folder, a .gguf file, or `default`"


def add_model_arguments(parser: ArgumentParser) -> None:
    """Add the options that say where and how the model runs."""
    add = parser.add_argument
    add("--device", help="cpu, cuda or cuda:1; default: the GPU if there is one")
    add("--dtype", choices=DTYPES, help="dtype of the weights; default bfloat16 on a GPU, float32 on a CPU")
    add("--trust-remote-code", action="store_true", help="run code that comes with the model")


def load_model(arguments: Namespace) -> Any:
    """Load the model that the arguments name, on this process's device; notes go to stderr."""
    import torch

    from rpe3d.evaluate.ranks import ranks
    from rpe3d.models.load import load

    here, began = ranks(), time.perf_counter()
    loaded = load(
        arguments.model,
        dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
        device=arguments.device or here.device,
        trust_remote_code=arguments.trust_remote_code,
    )
    if here.first:
        for text in loaded.notes:
            note(text)
        detail(f"loaded {loaded.source} in {time.perf_counter() - began:.1f} s")
    return loaded


def check_laws(arguments: Namespace, laws: Sequence[LawSpec], lengths: Sequence[int]) -> None:
    """Refuse laws that fit the model at none of these lengths, by its config, before its weights are read."""
    from rpe3d.evaluate.under import laws_at, raise_if_all_refuse
    from rpe3d.models.load import described

    if not laws:
        return
    known = described(arguments.model, trust_remote_code=arguments.trust_remote_code)
    if known is None:
        return  # a config of another kind: the check is made on the model once it is loaded
    for law in laws:
        law.check(known["pretrained"])
        made = laws_at([law], lengths or [known["pretrained"]], known)
        raise_if_all_refuse(made.values())
        for (label, length), one in made.items():
            detail(f"{label} at {length}: {one if isinstance(one, Exception) else one.json}")


def check_law(arguments: Namespace, law: LawSpec, context: int) -> None:
    """Refuse a law that does not fit the model at this context, by its config, before its weights are read."""
    from rpe3d.geometry import make_law
    from rpe3d.models.load import described

    known = described(arguments.model, trust_remote_code=arguments.trust_remote_code)
    if known is not None:
        law.check(known["pretrained"])
        make_law(law.name, context=context, **known, **law.parameters)


def check_loaded(model: Any, laws: Sequence[LawSpec]) -> None:
    """Refuse law files made for other models, and note when a checkpoint's own law is set aside."""
    from rpe3d.evaluate.ranks import ranks
    from rpe3d.models import law_of, pretrained_length

    own = law_of(model)
    if laws and own is not None and ranks().first:
        what = f"the checkpoint's own law ({summary(own)}) is replaced by the laws that are measured"
        note(f"{what}; `rpe3d eval MODEL --tasks ppl,passkey` measures it as it is")
    for law in laws:
        law.check(pretrained_length(model))


def summary(law: Any) -> str:
    """Describe a law in one line: its name, its context and all of its parameters."""
    own = [f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in law.own.items()]
    return ", ".join([f"{law.name} from {law.pretrained} to {law.context} tokens", *own])
