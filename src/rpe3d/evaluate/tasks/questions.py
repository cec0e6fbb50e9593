"""Where a benchmark's questions come from: a folder of the user's, or the hub."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rpe3d.config import ConfigError
from rpe3d.evaluate.tasks import leval, longbench
from rpe3d.evaluate.tasks.predictions import Record, read_records
from rpe3d.evaluate.texts import Text, read_texts
from rpe3d.text import OPENERS

SOURCES = {"longbench": longbench.SOURCE, "leval": leval.SOURCE}
ENDINGS = ("", *OPENERS)


@dataclass(frozen=True, kw_only=True)
class Data:
    """A task's questions, and what they were read from."""

    name: str
    records: list[Record]

    @property
    def sha256(self) -> str:
        """Digest of the records themselves, so that a compressed copy counts as the same."""
        return hashlib.sha256(json.dumps(self.records, sort_keys=True).encode()).hexdigest()


def load(suite: str, task: str, folder: Path | None) -> Data:
    """Load a task's questions from `FOLDER/SUITE/TASK.jsonl` or `FOLDER/TASK.jsonl`, else `TASK.mini.jsonl`.

    Files may be compressed (.xz, .gz, .bz2). Without a folder they are the hub's.
    """
    if folder is None:
        return _from_hub(suite, task)
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}", "give --data the folder with the benchmarks' files")
    for path in _places(suite, task, folder):
        if path.is_file():
            return Data(name=path.name, records=read_records(path))
    there = sorted(path.name for path in (*folder.glob("*.jsonl*"), *folder.glob("*/*.jsonl*")))
    found = f"; it has {', '.join(there[:5])}{' ...' if len(there) > 5 else ''}" if there else ""
    raise ConfigError(
        f"{folder} has no questions of {suite}:{task}{found}",
        f"get {SOURCES[suite]} and put its {task}.jsonl into {folder / suite}",
    )


def _places(suite: str, task: str, folder: Path) -> Iterator[Path]:
    for kind in ("jsonl", "mini.jsonl"):
        for ending in ENDINGS:
            yield folder / suite / f"{task}.{kind}{ending}"
            yield folder / f"{task}.{kind}{ending}"


def _from_hub(suite: str, task: str) -> Data:
    """LongBench is a ZIP archive on the hub, L-Eval a file a task. The hub's cache serves without a network."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    owner, name = (
        ("THUDM/LongBench", "data.zip") if suite == "longbench" else ("L4NLP/LEval", f"LEval/Exam/{task}.jsonl")
    )
    try:
        path = Path(hf_hub_download(owner, name, repo_type="dataset", etag_timeout=5))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError):
        raise ConfigError(
            f"the questions of {suite}:{task} are not here and the hub does not give them",
            f"get {SOURCES[suite]}, put its {task}.jsonl into DIR/{suite}, and give --data DIR",
        ) from None
    if suite == "leval":
        return Data(name=path.name, records=read_records(path))
    with zipfile.ZipFile(path) as archive:
        raw = archive.read(f"data/{task}.jsonl")
    return Data(name=f"{task}.jsonl", records=[json.loads(line) for line in io.BytesIO(raw) if line.strip()])


def load_texts(name: str, folder: Path | None) -> list[Text]:
    """Load the texts in `FOLDER/NAME`, for perplexity."""
    if folder is None or not (folder / name).is_dir():
        where = "--data is not given" if folder is None else f"there is no folder {folder / name}"
        raise ConfigError(f"ppl:{name} has no texts: {where}", f"put text files into DIR/{name}, and give --data DIR")
    paths = sorted(path for path in (folder / name).iterdir() if path.is_file())
    if not paths:
        raise ConfigError(f"the folder {folder / name} has no texts", "put text files into it, plain or compressed")
    return read_texts(paths)
