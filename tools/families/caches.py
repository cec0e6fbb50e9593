"""Which of transformers' caches a law works with, what each takes, and what the peers have: the page docs/caches.md.

    python tools/families/caches.py --out docs/caches.md

A cache is exact where prefill and decode give the logits of one forward. One that rounds its keys cannot; every call of
attention is then held to the specification, over the very keys that the cache hands back.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rpe3d.attention import attention
from rpe3d.models.cache_sizes import LayerCache, cache_bytes
from rpe3d.models.carried import module_carried, module_law
from rpe3d.models.extend import extend
from rpe3d.models.registry import NAME, attend
from survey import _line, _quiet
from tiny import CLOSE, CONTEXT, LAW, LONG, PROMPT, build, near

FAMILIES = ("llama", "gemma3_text", "qwen3_next", "deepseek_v3")
ROUNDED = ("fp8", "quanto", "hqq")
EIGHT_B = [LayerCache(numbers=2 * 8 * 128, window=None, state=0)] * 32
"""Layers of Llama 3.1 8B: 32 of 8 key heads with 128 dimensions."""


def _caches() -> dict[str, Callable[[Any], Any]]:
    from transformers import DynamicCache, QuantizedCache, StaticCache

    groups = {"nbits": 4, "q_group_size": 16, "residual_length": 8}
    return {
        "dynamic": lambda config: DynamicCache(config=config),
        "static": lambda config: StaticCache(config=config, max_cache_len=LONG),
        "offloaded": lambda config: DynamicCache(config=config, offloading=True),
        "fp8": lambda config: QuantizedCache("fp8", config),
        "quanto": lambda config: QuantizedCache("quanto", config, axis_key=0, axis_value=0, **groups),
        "hqq": lambda config: QuantizedCache("hqq", config, axis_key=1, axis_value=1, **groups),
    }


def verdict(name: str, model: Any, make: Callable[[Any], Any], ids: torch.Tensor) -> str:
    """Whether a law is exact in a cache, or what refuses."""
    try:
        extend(model, "3d-rpe", context=CONTEXT, **LAW)
        config = model.config.get_text_config(decoder=True)
        if name in ROUNDED:
            with _held_to_the_specification() as off:
                _decoded(model, ids, make(config))
            return "rounded" if off and max(off) < CLOSE else "WRONG"
        got, expected = _decoded(model, ids, make(config)), model(ids, use_cache=False).logits
        return "exact" if near(got, expected, CLOSE * float(expected.abs().max())) else "WRONG"
    except Exception as error:  # whatever transformers or we refuse with
        words = _line(error, 90)
        if "CUDA" in words:
            return "needs an accelerator"
        if isinstance(error, ImportError):
            return "not installed here"
        return "transformers refuses it" if "only full attention" in words else f"refused: {words}"


@contextmanager
def _held_to_the_specification() -> Iterator[list[float]]:
    """How far every call of our attention during a `with` is off the specification, relative to its largest number."""
    from transformers import AttentionInterface

    off: list[float] = []

    def checked(module: Any, query: Any, key: Any, value: Any, mask: Any, **given: Any) -> Any:
        out, _ = attend(module, query, key, value, mask, **given)
        s, held = key.shape[2], module_carried(module)
        queries, keys = (torch.arange(n, s)[None] for n in (s - query.shape[2], 0))
        right, _ = attention(
            held.arranged(query),
            held.arranged(key),
            value,
            module_law(module),
            query_positions=queries,
            key_positions=keys,
            scale=given.get("scaling"),
            rotated=True,
            impl="reference",
        )
        off.append(float((out - right.transpose(1, 2)).abs().max() / right.abs().max()))
        return out, None

    AttentionInterface.register(NAME, checked)
    try:
        yield off
    finally:
        AttentionInterface.register(NAME, attend)


def _decoded(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    parts = [model(ids[:, :PROMPT], past_key_values=cache, use_cache=True).logits]
    for t in range(PROMPT, ids.shape[1]):
        where = torch.tensor([[t]])
        parts.append(model(ids[:, t : t + 1], past_key_values=cache, position_ids=where, use_cache=True).logits)
    return torch.cat(parts, 1)


def page(families: Path) -> str:
    """The page as Markdown."""
    import transformers

    caches = _caches()
    ids = torch.randint(3, 97, (1, LONG), generator=torch.Generator().manual_seed(1))
    rows = []
    with _quiet(), torch.no_grad():
        for name, make in caches.items():
            found = [verdict(name, build(family, ids), make, ids) for family in FAMILIES]
            rows.append(f"| {name} | {' | '.join(found)} |")
    sizes = cache_bytes(EIGHT_B, 131072, torch.bfloat16)
    shown = " | ".join(f"{size / 2**30:.3g}" for size in sizes.values() if isinstance(size, int))
    survey = families.read_text(encoding="utf-8")
    counted = re.search(r"Of the (\d+) that rotate, (\d+) can be", survey)
    extended, rotating = (counted[2], counted[1]) if counted else ("?", "?")
    text = (Path(__file__).parent / "caches.in.md").read_text(encoding="utf-8")
    return text.format(
        version=transformers.__version__,
        families=" | ".join(FAMILIES),
        rule="|".join("---" for _ in range(len(FAMILIES) + 1)),
        caches="\n".join(rows),
        names=" | ".join(sizes),
        sizes=shown,
        lines="|".join("---" for _ in sizes),
        extended=extended,
        rotating=rotating,
    )


def main() -> None:
    """Try every cache, and write the page."""
    parser = argparse.ArgumentParser(prog="python tools/families/caches.py", description=__doc__)
    parser.add_argument("--out", type=Path, help="a Markdown file; stdout unless given")
    parser.add_argument("--families", type=Path, default=Path("docs/families.md"), help="the page of the survey")
    given = parser.parse_args()
    text = page(given.families)
    if given.out:
        given.out.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
