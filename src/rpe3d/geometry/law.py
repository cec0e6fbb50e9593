"""The base class of all laws: a law says how positions become angles."""

from __future__ import annotations

import json
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from rpe3d.config import ConfigError, Rotary, freeze, whole
from rpe3d.drawing.palette import OWN, Style
from rpe3d.geometry.frequencies import model_attention_scaling, model_frequencies
from rpe3d.geometry.region import STOCK, Region, Temperature, Turn


def parameter(default: Any, text: str, *, later: bool = False, unsaid: Any = None) -> Any:
    """Declare a parameter of a law: its default (None: derived, as the help says) and one line of help.

    A parameter that was added `later` than its law is written to files only if it differs from the default, so that
    files of older laws stay the same; `unsaid` is a derived value that is not written either.
    """
    return field(default=default, metadata={"help": text, "unsaid": (default, unsaid) if later else ()})


def apart(make: Callable[[], Any]) -> Any:
    """Return the result of `make`, called in a separate thread, where none of the caller's torch modes apply.

    An object that outlives its caller must not lie in the memory pool of a CUDA graph that is being warmed up, nor be
    an inference-mode tensor. Its computation on the device has finished when this returns.
    """
    result: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(make())
            if isinstance(result[0], Tensor) and result[0].is_cuda:
                torch.cuda.current_stream(result[0].device).synchronize()
        except BaseException as error:  # raised again where it was asked for
            failure.append(error)

    thread = threading.Thread(target=run, name="rpe3d-apart")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


@dataclass(frozen=True, kw_only=True)
class Law(ABC):
    """A position encoding as a frozen value: how positions become angles.

    Subclasses add parameters, validate them in `check`, and define `regions`.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    style: ClassVar[Style] = OWN
    """Colour, dash and width of the law's lines in every plot."""

    single_position: ClassVar[bool] = True
    """Whether the angle of every plane is θ_l f with one relative position f (`relative_position`)."""

    needs_attention: ClassVar[bool] = True
    """Whether the law rotates some pairs differently than its frequencies alone would."""

    grows: ClassVar[bool] = False
    """Whether the frequencies change as a text grows, so that cached keys keep those of an earlier length."""

    pretrained: int
    context: int
    rotary: Rotary
    json: str = field(init=False, repr=False, compare=False)
    """`to_dict()` as a JSON string, made once: the form of a law in a compiled graph and in a file."""
    _kept: dict[Any, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        pretrained = whole("pretrained", self.pretrained, least=2)
        context = whole("context", self.context)
        if context < pretrained:
            raise ConfigError(
                f"context is {context}, below the pretrained length {pretrained}",
                "raise context, or use the model as it is",
            )
        if not isinstance(self.rotary, Rotary):
            raise ConfigError(f"rotary is {self.rotary!r}, which is not a Rotary", "pass rotary=Rotary(head_dim=...)")
        freeze(self, pretrained=pretrained, context=context)
        freeze(self, **self.check())
        self.frequencies()  # a law that cannot make its table is refused now, not in the middle of a run
        freeze(self, json=json.dumps(self.to_dict()))

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, called once per `key` and cached with this law (a tensor on a device, say)."""
        if key not in self._kept:
            self._kept[key] = apart(make)
        return self._kept[key]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the cached results: a copy, or another process, makes its own."""
        return {**self.__dict__, "_kept": {}}

    def check(self) -> dict[str, Any]:
        """Return the parameters of this law, validated, with defaults filled in; {} for a law without any."""
        return {}

    @property
    @abstractmethod
    def regions(self) -> tuple[Region, ...]:
        """Bands of (query, key) pairs, and how q and k are rotated in each."""

    @property
    def factor(self) -> float:
        """The context as a multiple of the pretrained length."""
        return self.context / self.pretrained

    @property
    def endless(self) -> bool:
        """Whether no text is too long for this law, since the positions it shows do not depend on the context."""
        return False

    @property
    def exact_up_to(self) -> float:
        """Longest text, in tokens, in which the frequencies alone rotate every pair (w + c for 3D-RPE)."""
        ends: list[float] = []
        for region in self.regions:
            if region == Region(unit=region.unit, last=region.last):
                ends.append(math.inf if region.last is None else (region.last + 1) * region.unit)
            else:
                ends.append((region.first or 0) * region.unit)
        return min(ends)

    @property
    def single_turn(self) -> Turn | None:
        """The one turn of queries and keys that serves all pairs, so that any attention can run the law; else None."""
        region, *others = self.regions
        same = region == Region(query=region.key, key=region.key)
        return region.key if same and not others else None

    @property
    def keeps_frequencies(self) -> bool:
        """Whether the law uses the frequencies θ_l of the pretrained model."""
        return type(self).frequencies is Law.frequencies

    @property
    def keeps_scaling(self) -> bool:
        """Whether cos and sin are multiplied by the same factor as in the pretrained model."""
        return self.attention_scaling == model_attention_scaling(self.rotary)

    @property
    def is_stock(self) -> bool:
        """Whether a model under this law is the pretrained model itself, at any length."""
        return self.keeps_frequencies and self.keeps_scaling and self.single_turn == STOCK

    @property
    def layers(self) -> Mapping[int, Law]:
        """Layers of a model, counted from 0, that have another law than this one; none for most laws."""
        return {}

    @property
    def both(self) -> tuple[Law, Law] | None:
        """Two laws in one: the pairs of this one, and those of another beside it, held back; None for most laws."""
        return None

    @cached_property
    def chooses(self) -> bool:
        """Whether in some region a query attends only to the keys that it chooses."""
        return any(region.choice is not None for region in self.regions)

    @property
    def chunk_in_use(self) -> int | None:
        """Number of tokens in a chunk, for a law that uses chunks; else None."""
        return None

    def model_frequencies(self) -> Float64[Tensor, " l"]:
        """Return θ_l of the pretrained model."""
        return model_frequencies(self.rotary)

    def frequencies(self, length: int | None = None) -> Float64[Tensor, " l"]:
        """Return the frequencies θ_l of this law.

        `length`, the tokens seen, matters only to a law that `grows`; None stands for the whole context.
        """
        return self.model_frequencies()

    @property
    def attention_scaling(self) -> float:
        """Factor that multiplies cos and sin (YaRN's temperature)."""
        return model_attention_scaling(self.rotary)

    @property
    def temperature(self) -> Temperature | None:
        """Factor that multiplies the scores of a query depending on its position, or None."""
        return None

    @property
    def rate(self) -> float:
        """Relative position shown per token of distance (1; PI shows L_p / L)."""
        return 1.0

    def relative_position(self, query: Tensor | int, key: Tensor | int) -> Float64[Tensor, "..."]:
        """Return the relative position f that each pair is shown: plane l is rotated by θ_l f between query and key.

        `query` and `key` are integer positions, broadcast against each other. The result is NaN for a pair that is not
        attended to (streaming-llm).
        """
        if not self.single_position:
            raise ConfigError(
                f"{self.name} has no single relative position: its planes rotate by different multiples of θ",
                "use law.relative_angles(query, key), which returns one angle per plane",
            )
        q, k = _pairs(query, key)
        f = torch.full(q.shape, torch.nan, dtype=torch.float64, device="cpu")
        for region in self.regions:
            seen = region.query.position(q) - region.key.position(k)
            f = torch.where(region.contains(q, k), seen * self.rate, f)
        return f

    def relative_angles(
        self, query: Tensor | int, key: Tensor | int, length: int | None = None
    ) -> Float64[Tensor, "... l"]:
        """Return the angle of every plane between a query and a key, which the score depends on (eqs. 3 and 5)."""
        q, k = _pairs(query, key)
        theta = self.frequencies(length)
        angles = torch.full((*q.shape, len(theta)), torch.nan, dtype=torch.float64, device="cpu")
        for region in self.regions:
            seen = (region.query.positions(q) - region.key.positions(k)) * theta
            if region.query.phase is not None:
                seen = seen + region.query.phase(q // region.query.chunk)[..., None]
            if region.key.phase is not None:
                seen = seen - region.key.phase(k // region.key.chunk)[..., None]
            angles = torch.where(region.contains(q, k)[..., None], seen, angles)
        return angles

    @classmethod
    def parameters(cls) -> dict[str, str]:
        """Return the parameters of this law and their help."""
        return {f.name: f.metadata["help"] for f in fields(cls) if "help" in f.metadata}

    @classmethod
    def as_saved(cls, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters of a file with the meaning they had when it was written, before defaults changed."""
        return dict(own)

    @property
    def own(self) -> dict[str, Any]:
        """Parameters of this law, JSON-ready."""
        given = {f: getattr(self, f.name) for f in fields(self) if "help" in f.metadata}
        return {f.name: _json_ready(x) for f, x in given.items() if x not in f.metadata["unsaid"]}

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments of `make_law` that recreate this law, JSON-ready."""
        size = {"pretrained": self.pretrained, "context": self.context}
        return {"name": self.name, **size, **self.rotary.to_dict(), **self.own}


def _json_ready(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _pairs(query: Tensor | int, key: Tensor | int) -> tuple[Int[Tensor, "..."], Int[Tensor, "..."]]:
    """Return both positions as int64 tensors of one shape."""
    q, k = _positions("query", query), _positions("key", key)
    try:
        q, k = torch.broadcast_tensors(q, k)
        return q, k
    except RuntimeError:
        raise ConfigError(
            f"query positions {tuple(q.shape)} and key positions {tuple(k.shape)} do not broadcast",
            "pass query[:, None] and key[None, :] for all pairs",
        ) from None


def _positions(name: str, value: Tensor | int) -> Int[Tensor, "..."]:
    try:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"{name} is {value!r}, which is not a position", "pass an int or int tensor") from None
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
        raise ConfigError(
            f"{name} positions have dtype {tensor.dtype}", "pass integers: bfloat16 cannot tell 256 from 257"
        )
    tensor = tensor.to(device="cpu", dtype=torch.int64)
    if tensor.numel() and tensor.min() < 0:
        raise ConfigError(f"{name} position {int(tensor.min())} is negative", "positions count from 0")
    return tensor
