"""Language modelling: windows of a fixed number of tokens, cut from documents in turn.

A window never crosses documents unless `pack` joins them: then a document is followed by the end-of-text token and
the next one, as LongLoRA does, and every token is used. Otherwise what is left of a document is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from rpe3d.config import ConfigError
from rpe3d.text import encode, opening
from rpe3d.train.corpus import Corpus
from rpe3d.train.samples import Place, Sample, ending, shuffled


class Lane:
    """The place in one document that is being read: its pieces as tokens, and how many of the first are used."""

    def __init__(self, number: int, pieces: Iterator[tuple[int, list[int]]], start: int = 0, used: int = 0) -> None:
        self.number = number
        self.pieces = pieces
        self.start = start
        self.held: deque[tuple[int, int, list[int]]] = deque()  # document, start, tokens
        self.used = used

    def fill(self, tokens: int) -> bool:
        """Read until so many tokens are buffered; return False if the document ends before."""
        while sum(len(piece) for _, _, piece in self.held) - self.used < tokens:
            following = next(self.pieces, None)
            if following is None:
                return False
            self.held.append((self.number, *following))
        return True

    @property
    def place(self) -> list[int]:
        """Document, start of a piece in it, and number of used tokens of that piece."""
        return [*(self.held[0][:2] if self.held else (self.number, self.start)), self.used]

    def take(self, tokens: int) -> tuple[list[int], int, int]:
        """Take so many tokens, and return them with the document and the piece in which they start."""
        number, start, _ = self.held[0]
        taken: list[int] = []
        while len(taken) < tokens:
            piece = self.held[0][2]
            part = piece[self.used : self.used + tokens - len(taken)]
            taken += part
            self.used += len(part)
            if self.used == len(piece):
                self.held.popleft()
                self.used = 0
        return taken, number, start


class Windows:
    """The endless sequence of windows, from a place on."""

    def __init__(
        self, corpus: Corpus, tokenizer: Any, *, length: int, mix: int, pack: bool, seed: int, field: str, place: Place
    ) -> None:
        self.corpus = corpus
        self.tokenizer = tokenizer
        self.opening = list(opening(tokenizer))
        self.ending = ending(tokenizer) if pack else []
        self.length = length
        self.lanes_at_most = min(mix, len(corpus))
        self.pack = pack
        self.seed = seed
        self.field = field
        self.epoch = int(place.get("epoch", 0))
        self.next = int(place.get("next", 0))
        self.order = shuffled(len(corpus), seed, self.epoch)
        self.lanes = deque(self._lane(*lane) for lane in place.get("lanes", ()))
        self.barren = 0  # documents in a row that gave no window

    def __iter__(self) -> Iterator[Sample]:
        own = self.length if self.pack else self.length - len(self.opening)
        while True:
            while len(self.lanes) < self.lanes_at_most:
                self.lanes.append(self._lane(self._following()))
            lane = self.lanes.popleft()
            if not self._filled(lane, own):
                continue
            self.barren = 0
            ids, number, start = lane.take(own)
            if lane.fill(1):
                self.lanes.append(lane)
            source, index = self.corpus[number]
            name = source.name(index) + (f", from {start} on" if start else "")
            if not self.pack:
                ids = self.opening + ids
            yield Sample(ids=ids, labels=ids, name=name, after=self._place())

    def _filled(self, lane: Lane, tokens: int) -> bool:
        """Return whether the lane has a whole window, from one document or from several that are joined."""
        while not lane.fill(tokens):
            self.barren += 1
            if self.barren > 2 * len(self.corpus) and not (self.pack and lane.held):
                raise ConfigError(
                    f"no document is as long as a window of {tokens} tokens",
                    "pass longer texts, lower --length, or join them with --pack",
                )
            if not self.pack:
                return False
            lane.number = self._following()
            lane.pieces = self._pieces(lane.number, 0)
        return True

    def _following(self) -> int:
        """Return the next document of the epoch, or the first of the next epoch."""
        if self.next == len(self.order):
            self.epoch, self.next = self.epoch + 1, 0
            self.order = shuffled(len(self.corpus), self.seed, self.epoch)
        self.next += 1
        return self.order[self.next - 1]

    def _lane(self, number: int, start: int = 0, used: int = 0) -> Lane:
        return Lane(number, self._pieces(number, start), start, used)

    def _pieces(self, number: int, start: int) -> Iterator[tuple[int, list[int]]]:
        source, index = self.corpus[number]
        for piece in source.pieces(index, start, self.field):
            tokens = encode(self.tokenizer, piece.text)
            if self.pack:
                tokens = (self.opening if piece.start == 0 else []) + tokens + (self.ending if piece.last else [])
            yield piece.start, tokens

    def _place(self) -> Place:
        return {"epoch": self.epoch, "next": self.next, "lanes": [lane.place for lane in self.lanes]}
