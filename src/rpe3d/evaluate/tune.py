"""Pick the parameters of 3d-rpe for a model from the context that it really uses.

The law file: what `Law.to_dict` gives, and "measured": {"command", "model", "versions", "texts", "seeds", "criterion",
"effective": positions, or 0 if it copies from nowhere, "distances": [{"distance", "first", "again", "text"}],
"weighed": {"even", "anchored" and, if choices were tried, "chosen", "wide": {"length", "seeds", "text", "again"}},
and "picked": {"way": one of them, "criterion"}; both are empty if there was nothing to choose. Files of 0.2 have no
"picked"}.
Instead of what follows "texts", the file of `rpe3d tune --law dpe` has "task", "samples", "others": the scale of the
groups that are not being tried, and "trials": [{"group", "scale", "score"}].
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rpe3d.config import whole
from rpe3d.evaluate import effective
from rpe3d.evaluate.effective import Distance, Way, Weighed
from rpe3d.evaluate.grid import Progress, silent
from rpe3d.evaluate.origin import versions
from rpe3d.evaluate.texts import Text, default_texts, tokenize
from rpe3d.evaluate.under import about
from rpe3d.files import write_json
from rpe3d.geometry import Law, make_law
from rpe3d.models import as_stock, facts
from rpe3d.text import opening

TRIALS = 4
WEIGHED = 2
"""Trials for each way that is tried, at twice the pretrained length."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """A law chosen for a model, and the measurements behind the choice."""

    law: Law
    effective: int
    """Number of positions back that the model copies from; 0 if none, when the law follows the rule of thumb."""
    distances: list[Distance]
    length: int
    """Tokens in the windows of `weighed`."""
    weighed: dict[Way, Weighed]
    """Cost of each way to see far keys; empty if there was nothing to choose."""
    picked: Way | None
    """Way in `weighed` that the law uses (`effective.cheapest`); None if there was nothing to choose."""
    measured: dict[str, Any]
    """Origin of the law, as the law file records it."""

    @property
    def content(self) -> dict[str, Any]:
        """The content of the law file: the law, and what it was chosen by."""
        return {**self.law.to_dict(), "measured": self.measured}

    def write(self, path: str | Path) -> Path:
        """Write the law file, which `extend` and every --law option accept."""
        write_json(Path(path), self.content)
        return Path(path)


def tune(
    model: Any,
    tokenizer: Any,
    *,
    context: int,
    texts: Sequence[Text] = (),
    trials: int = TRIALS,
    seed: int = 0,
    chosen: bool | None = None,
    name: str | None = None,
    command: str | None = None,
    progress: Progress = silent,
) -> Tuned:
    """Measure how far back a model can copy and choose 3d-rpe's parameters for `context`; the model is left stock.

        tuned = rpe3d.evaluate.tune(model, tokenizer, context=65536)
        rpe3d.extend(model, tuned.law)

    The model reads `texts` (default: Python's language reference) in windows of the pretrained length and of twice
    that. `chosen` says whether to try a chosen far field (`far`) as well; by default only on a GPU, which has kernels
    for it.
    """
    seed, trials = whole("seed", seed, least=0), whole("trials", trials)
    texts = list(texts) or default_texts()
    known = facts(as_stock(model))
    pretrained, first = known["pretrained"], opening(tokenizer)
    law = make_law("3d-rpe", context=context, **known)  # refuses a context before anything is measured
    tokens = [tokenize(tokenizer, text) for text in texts]
    seeds = list(range(seed, seed + trials))
    distances = effective.measure_distances(model, tokens, pretrained, seeds, first, progress)
    used = effective.effective_context(distances)
    length = min(context, 2 * pretrained, effective.longest(tokens))
    again, weighed = seeds[:WEIGHED], {}
    if 0 < used < length:
        with_chosen = model.device.type == "cuda" if chosen is None else chosen
        ways = effective.ways(used, pretrained, length, chosen=with_chosen)
        weighed = effective.weigh(model, used, pretrained, tokens, length, again, first, progress, ways=ways)
    picked = effective.cheapest(weighed, longer=context > length) if weighed else None
    if used:
        law = make_law(
            "3d-rpe", context=context, **known, **effective.pick(used, pretrained, context, picked or "even")
        )
    measured = {
        "command": command or shlex.join(sys.argv),
        "model": about(model, name or model.config.name_or_path, known),
        "versions": versions(),
        "texts": [{"name": text.name, "sha256": text.sha256} for text in texts],
        "seeds": seeds,
        "criterion": f"again / first, averaged with both neighbours, is at most {effective.AT_MOST}",
        "effective": used,
        "distances": [asdict(one) for one in distances],
        "weighed": {way: {"length": length, "seeds": again, **asdict(one)} for way, one in weighed.items()},
        "picked": {"way": picked, "criterion": _criterion(picked, weighed)} if picked else {},
    }
    return Tuned(
        law=law,
        effective=used,
        distances=distances,
        length=length,
        weighed=weighed,
        picked=picked,
        measured=measured,
    )


def _criterion(picked: Way, weighed: Mapping[Way, Weighed]) -> str:
    if picked == effective.cheapest(weighed):
        return "text + again is the lowest"
    return f"text + again is within {effective.LEVEL} of the lowest, and the context is longer than the windows"
