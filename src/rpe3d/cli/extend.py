"""`rpe3d extend`: a checkpoint that carries its law, for `from_pretrained` after `import rpe3d`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from rpe3d.cli.arguments import law, need, new_folder, size, value
from rpe3d.cli.compare import DTYPES
from rpe3d.config import ConfigError

SIZES = ("chunk", "window", "reach")
"""Parameters of laws that have an option of their own."""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a Hugging Face name or folder, a .gguf file, or `default`")
    add("--context", metavar="N", type=size, required=True, help="target context length, e.g. 64k")
    add("--out", metavar="DIR", type=Path, required=True, help="a new folder for the checkpoint")
    add("--law", default="3d-rpe", help="the law, as `rpe3d doctor` lists them; default 3d-rpe")
    add_law_arguments(parser)
    add("--dtype", choices=DTYPES, help="convert the weights; default: copy them as they are (a .gguf becomes float32)")
    add("--trust-remote-code", action="store_true", help="run code that comes with the model")


def add_law_arguments(parser: ArgumentParser) -> None:
    """Add the options of `law_parameters`."""
    add = parser.add_argument
    add("--set", metavar="NAME=VALUE", action="append", default=[], help="a parameter of the law; again for more")
    for name in SIZES:
        add(f"--{name}", metavar="N", type=size, help=f"the law's {name}, in tokens")


def law_parameters(arguments: Namespace) -> dict[str, Any]:
    """Return --chunk, --window, --reach and --set as keywords of `extend`."""
    sizes = {name: getattr(arguments, name) for name in SIZES}
    parameters: dict[str, Any] = {name: tokens for name, tokens in sizes.items() if tokens is not None}
    for item in arguments.set:
        name, equals, given = item.partition("=")
        if not equals:
            raise ConfigError(f"--set {item} has no value", "write it as --set name=value")
        parameters[name.replace("-", "_")] = value(given)
    return parameters


def run(arguments: Namespace) -> int:
    need("models", "transformers")
    given = law(arguments.law)
    parameters = {**given.parameters, **law_parameters(arguments)}
    out: Path = arguments.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} already exists", "pass a new folder to --out")
    import torch

    from rpe3d.models.checkpoint import can_be_copied, copy_with_config, origin
    from rpe3d.models.extend import check_savable, extend, pretrained_length
    from rpe3d.models.load import load

    source = Path(arguments.model).expanduser()
    tokenizer = not source.is_dir() or any(source.glob("tokenizer*"))
    is_file = arguments.model == "default" or source.is_file()
    dtype: Any = getattr(torch, arguments.dtype) if arguments.dtype else torch.float32 if is_file else "auto"
    trust = arguments.trust_remote_code
    loaded = load(arguments.model, dtype=dtype, trust_remote_code=trust, with_tokenizer=tokenizer)
    for note in (*loaded.notes, *(() if tokenizer else ("the folder has no tokenizer, so none is written",))):
        print(f"note: {note}", file=sys.stderr)
    given.check(pretrained_length(loaded.model))
    extend(loaded.model, given.name, context=arguments.context, **parameters)
    check_savable(loaded.model)
    folder = None if arguments.dtype else origin(loaded.source)
    with new_folder("--out", out) as unfinished:
        if folder is not None and can_be_copied(folder, loaded.model):
            copy_with_config(folder, loaded.model, arguments.context, unfinished)
        else:
            loaded.model.save_pretrained(unfinished)
            if loaded.tokenizer is not None:
                loaded.tokenizer.model_max_length = arguments.context
                loaded.tokenizer.save_pretrained(unfinished)
    print(f"wrote {out}: `import rpe3d`, then AutoModelForCausalLM.from_pretrained({str(out)!r})", file=sys.stderr)
    return 0
