"""Documents by number: text files, folders, .jsonl and .json files, a Hugging Face dataset, or `python-topics`.

A text file is read in pieces, a .jsonl file by line offsets, and a dataset stays on disk: none is in memory as a whole.
A .json list is.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rpe3d.config import ConfigError
from rpe3d.models.checkpoint import sha256
from rpe3d.text import DAMAGED, OPENERS, opened, reading

RECORDS = (".jsonl", ".json")
TOPICS = "python-topics"
PIECE = 2**20  # bytes of a text that are read, and tokenized, at once
LONGEST = 2**30  # bytes of a line: it is read whole


class Excerpt(NamedTuple):
    """Part of a document: where it starts, its text, and whether it is the last part."""

    start: int
    text: str
    last: bool


class Source(Protocol):
    """A source of documents, by number."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """Return the name of a document in errors and logs."""

    def pieces(self, index: int, start: int, field: str) -> Iterator[Excerpt]:
        """Yield a document's text from `start` on, which is 0 or where a piece started."""

    def record(self, index: int) -> dict[str, Any]:
        """Return the fields of a document."""

    def fingerprint(self) -> str:
        """Return a digest of all that the documents are made from."""


@dataclass(frozen=True)
class TextFile:
    """One document: a UTF-8 file, plain or compressed."""

    path: Path

    def __len__(self) -> int:
        return 1

    def name(self, index: int) -> str:
        return str(self.path)

    def record(self, index: int) -> dict[str, Any]:
        raise ConfigError(f"{self.path} is plain text, without questions and answers", "pass a .jsonl file")

    def fingerprint(self) -> str:
        return _digest(self.path)

    def pieces(self, index: int, start: int, field: str) -> Iterator[Excerpt]:
        with reading(self.path, "pass a text file") as file:
            file.seek(start)
            block = file.read(PIECE + 1)
            while block:  # where a piece ends depends on where it starts alone
                last = len(block) <= PIECE
                cut = len(block) if last else _cut(block[:PIECE])
                yield Excerpt(start, self._decoded(block[:cut], start), last)
                start += cut
                block = block[cut:]
                block += file.read(PIECE + 1 - len(block))

    def _decoded(self, block: bytes, start: int) -> str:
        try:
            return (block.removeprefix(codecs.BOM_UTF8) if start == 0 else block).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{self.path} is not UTF-8 text (byte {start + error.start} is {block[error.start]:#04x})",
                "convert it, or leave it out of the folder",
            ) from None


def _cut(block: bytes) -> int:
    """Return where a block is best cut: after its last line, else its last space, else between two characters."""
    at = block.rfind(b"\n") + 1 or block.rfind(b" ") + 1
    if at:
        return at
    at = len(block)
    while at > 1 and block[at - 1] & 0xC0 == 0x80:
        at -= 1
    return max(at - 1, 1)


class Records(ABC):
    """Documents with fields, whose text is one of them."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the name of a document for users."""

    @abstractmethod
    def record(self, index: int) -> dict[str, Any]:
        """Return the fields of a document."""

    def pieces(self, index: int, start: int, field: str) -> Iterator[Excerpt]:
        text = self.record(index).get(field)
        if not isinstance(text, str):
            raise ConfigError(f"{self.name(index)} has no text in {field!r}", "name its field with --text-field")
        while start < len(text):
            stop = min(start + PIECE, len(text))
            if stop < len(text):
                stop = max(text.rfind("\n", start, stop), text.rfind(" ", start, stop)) + 1 or stop
            yield Excerpt(start, text[start:stop], stop == len(text))
            start = stop


@dataclass(frozen=True)
class Lines(Records):
    """A .jsonl file: one document per line, ignoring empty lines."""

    path: Path

    @cached_property
    def _places(self) -> tuple[array[int], array[int]]:
        """Offset of each non-empty line, and its number."""
        starts, numbers, at = array("q"), array("q"), 0
        with opened(self.path) as file:
            number = 0
            while line := file.readline(LONGEST):
                number += 1
                if len(line) == LONGEST:
                    raise ConfigError(
                        f"line {number} of {self.path} is longer than {LONGEST >> 20} MiB", "pass it as a text file"
                    )
                if line.strip():
                    starts.append(at)
                    numbers.append(number)
                at += len(line)
        return starts, numbers

    def __len__(self) -> int:
        return len(self._places[0])

    def name(self, index: int) -> str:
        return f"line {self._places[1][index]} of {self.path}"

    def record(self, index: int) -> dict[str, Any]:
        with opened(self.path) as file:
            file.seek(self._places[0][index])
            return _record(self.name(index), file.readline())

    def fingerprint(self) -> str:
        return _digest(self.path)


@dataclass(frozen=True)
class Rows(Records):
    """Records that already exist: a .json array, or a Hugging Face dataset, which stays on disk."""

    rows: Any
    label: str
    """Name of its records, with {} for the number."""
    digest: str = ""
    """Digest of the file or dataset; made from the records if empty."""

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, index: int) -> str:
        return self.label.format(index + 1)

    def record(self, index: int) -> dict[str, Any]:
        return _object(self.name(index), self.rows[index])

    def fingerprint(self) -> str:
        return self.digest or hashlib.sha256(json.dumps(self.rows).encode()).hexdigest()


def _digest(path: Path) -> str:
    try:
        return sha256(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", "make it readable, or leave it out") from None


def _record(name: str, line: bytes) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON ({error})", "fix or remove that line") from None
    return _object(name, content)


def _object(name: str, content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ConfigError(f"{name} is not an object with fields", 'write it as {"text": "..."}')
    return content


class Corpus:
    """All documents of several sources, numbered consecutively."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = list(sources)
        self.ends = list(accumulate(len(source) for source in self.sources))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def fingerprint(self) -> str:
        """Return a digest of all documents, in order."""
        return hashlib.sha256("\n".join(source.fingerprint() for source in self.sources).encode()).hexdigest()

    def __getitem__(self, number: int) -> tuple[Source, int]:
        """Return the source that has a document, and its number there."""
        at = bisect_right(self.ends, number)
        return self.sources[at], number - (self.ends[at - 1] if at else 0)


def open_corpus(names: Sequence[str], split: str = "train") -> Corpus:
    """Open the documents of files, folders and dataset names, in a fixed order."""
    corpus = Corpus([source for name in names for source in _sources(name, split)])
    if not len(corpus):
        raise ConfigError(f"there are no documents in {', '.join(names)}", "pass files that have some")
    return corpus


def _sources(name: str, split: str) -> Iterator[Source]:
    path = Path(name).expanduser()
    if name == TOPICS:
        yield _topics()
        return
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.is_file() and not f.name.startswith("."))
        if not files:
            raise ConfigError(f"the folder {path} is empty", "pass a folder of text files, or of .jsonl files")
        for file in files:
            yield _file(file)
    elif path.is_file():
        yield _file(path)
    else:
        yield _dataset(name, split)


def _topics() -> Source:
    """Return Python's language reference, which every machine has: by topic, as texts and as question-answer pairs."""
    from pydoc_data.topics import topics

    asked = "What does the Python language reference say about {}?"
    rows = [{"text": text, "instruction": asked.format(name), "output": text} for name, text in sorted(topics.items())]
    return Rows(rows=rows, label=f"topic {{}} of {TOPICS}")


def _file(path: Path) -> Source:
    suffixes = [s.lower() for s in path.suffixes if s.lower() not in OPENERS]
    if path.stat().st_size == 0:
        raise ConfigError(f"{path} is empty", "leave it out")
    if not suffixes or suffixes[-1] not in RECORDS:
        return TextFile(path)
    try:
        if suffixes[-1] == ".jsonl":
            lines = Lines(path)
            len(lines)  # reads it once: what is damaged is said before anything is trained
            return lines
        with opened(path) as file:
            rows = json.load(file)
    except (OSError, *DAMAGED) as error:
        raise ConfigError(f"cannot read {path} ({error})", "copy it again") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error})", "for one record per line, name it .jsonl") from None
    if not isinstance(rows, list):
        raise ConfigError(f"{path} is not a list of records", "pass a list, or a .jsonl file with one record per line")
    return Rows(label=f"record {{}} of {path}", rows=rows, digest=_digest(path))


def _dataset(name: str, split: str) -> Source:
    if name.startswith((".", "/", "~")) or find_spec("datasets") is None:
        hint = "pass files or folders; for a dataset from the hub: pip install datasets"
        raise ConfigError(f"there is no file or folder {name}", hint)
    from datasets import Dataset, load_dataset

    try:
        rows = load_dataset(name, split=split)
    except Exception as error:  # the hub, the network and every builder raise what they like
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"there is no file or folder {name}, and no dataset of that name loaded ({line})", "check the spelling"
        ) from error
    if not isinstance(rows, Dataset):
        raise ConfigError(f"split {split!r} of {name} is not one table", "pass --split train, or train[:20000]")
    return Rows(label=f"row {{}} of {name}", rows=rows, digest=str(rows._fingerprint))
