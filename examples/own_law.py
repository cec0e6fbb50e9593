"""Define a law, see what it shows the model, and run a model under it.

Run it with `python examples/own_law.py`; docs/guides/add-a-law.md says how it becomes a law of the package.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import rpe3d
from rpe3d.config import whole
from rpe3d.geometry.law import parameter
from rpe3d.geometry.region import Region, Turn
from rpe3d.geometry.registry import LAWS
from rpe3d.models.load import load


@dataclass(frozen=True, kw_only=True)
class Half(rpe3d.Law):
    """Count distances beyond the window half: f = d up to w, then w + (d - w) / 2."""

    name: ClassVar[str] = "half"
    summary: ClassVar[str] = "exact window, farther distances count half"
    window: int = parameter(None, "exact RoPE up to here; default a quarter of pretrained")

    def check(self) -> dict[str, Any]:
        return {"window": whole("window", self.pretrained // 4 if self.window is None else self.window)}

    @property
    def regions(self) -> tuple[Region, ...]:
        query, key = Turn(stride=0.5, start=self.window / 2), Turn(stride=0.5)
        return Region(last=self.window), Region(first=self.window + 1, query=query, key=key)


LAWS[Half.name] = Half  # a file in src/rpe3d/geometry/laws/ is found by itself
loaded = load("default")
law = rpe3d.law_of(rpe3d.extend(loaded.model, "half", context=14336, window=64))
print("a key 10,000 tokens back is shown at", law.relative_position(10_000, 0).item())
prompt = loaded.tokenizer("The sea is blue. " * 30 + "The sea is", return_tensors="pt").to(loaded.model.device)
print(loaded.tokenizer.decode(loaded.model.generate(**prompt, max_new_tokens=3, do_sample=False)[0, -6:]))
