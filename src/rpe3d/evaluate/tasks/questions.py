"""Find a benchmark's questions: in the user's folder, on the hub, or made by the suite itself."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rpe3d.config import ConfigError
from rpe3d.evaluate.tasks import Task, babilong, leval, longbench, longbench_v2
from rpe3d.evaluate.tasks.babilong_build import stories
from rpe3d.evaluate.tasks.predictions import Record, read_records
from rpe3d.evaluate.texts import Text, read_texts
from rpe3d.text import OPENERS, reading

SOURCES = {"longbench": longbench.SOURCE, "leval": leval.SOURCE, "longbench-v2": longbench_v2.SOURCE}
SOURCES["babilong"] = babilong.SOURCE
MADE = ("kv", "infinitebench")
"""Suites that make their own questions if there is no file."""
ENDINGS = ("", *OPENERS)


@dataclass(frozen=True, kw_only=True)
class Data:
    """A task's questions, and what they were read from."""

    name: str
    records: list[Record]
    at: Mapping[int, Data] = field(default_factory=dict)
    """Instead of `records`, the questions of some lengths, each from a separate file."""

    @property
    def sha256(self) -> str:
        """Digest of the uncompressed records, so that a compressed copy counts as the same."""
        return hashlib.sha256(json.dumps(self.records, sort_keys=True).encode()).hexdigest()


def find(task: Task, folder: Path | None, lengths: Sequence[int] | None) -> Data | None:
    """Return a task's questions from `folder` or the hub; None for a task that reads none or makes its own."""
    group, name = task
    if folder is not None and group in (*SOURCES, *MADE):
        _check_folder(folder)
    if group in SOURCES:
        return _babilong(name, folder, lengths) if group == "babilong" else load(group, name, folder)
    if group in MADE and folder is not None and any(path.is_file() for path in _places(group, name, folder)):
        return load(group, name, folder)
    return None


def reads_text(task: Task, data: Data | None) -> bool:
    """Return whether a task needs texts: to measure on, or as the haystack of questions that it makes."""
    if task[0] == "babilong":
        return data is not None and bool(data.records) and "facts" in data.records[0]
    return task[0] in ("ppl", "copy", "longppl", "ruler", "needle")


def load(suite: str, task: str, folder: Path | None) -> Data:
    """Load a task's questions from `FOLDER/SUITE/TASK.jsonl` or `FOLDER/TASK.jsonl`, else `TASK.mini.jsonl`.

    Files may be compressed (.xz, .gz, .bz2). Without a folder they come from the hub.
    """
    if folder is None:
        return _from_hub(suite, task)
    _check_folder(folder)
    for path in _places(suite, task, folder):
        if path.is_file():
            return Data(name=path.name, records=_read(path))
    raise _missing(suite, task, folder)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}", "pass the folder with the benchmarks' files to --data")


def _missing(suite: str, task: str, folder: Path) -> ConfigError:
    there = sorted(path.name for path in (*folder.glob("*.jsonl*"), *folder.glob("*/*.jsonl*")))
    found = f"; it has {', '.join(there[:5])}{' ...' if len(there) > 5 else ''}" if there else ""
    return ConfigError(
        f"{folder} has no questions of {suite}:{task}{found}",
        f"get {SOURCES[suite]} and {_files(suite, task)} into {folder / suite}",
    )


def _files(suite: str, task: str) -> str:
    return {"longbench-v2": "put it", "babilong": "put them"}.get(suite, f"put its {task}.jsonl")


def _places(suite: str, task: str, folder: Path) -> Iterator[Path]:
    if suite == "longbench-v2":
        yield from (folder / suite / f"data.{kind}{ending}" for kind in ("json", "jsonl") for ending in ENDINGS)
        return
    if suite == "kv":
        yield from (folder / suite / f"kv-retrieval-{task}.jsonl{ending}" for ending in ENDINGS)
    if suite in MADE:  # a file beside may be another suite's: passkey.jsonl says little
        yield from (folder / suite / f"{task}.jsonl{ending}" for ending in ENDINGS)
        return
    for kind in ("jsonl", "mini.jsonl"):
        for ending in ENDINGS:
            yield folder / suite / f"{task}.{kind}{ending}"
            yield folder / f"{task}.{kind}{ending}"


def _read(path: Path) -> list[Record]:
    """Read a JSONL file, or a .json file with one list of records."""
    if ".json" not in path.suffixes[-2:]:
        return read_records(path)
    hint = "pass the benchmark's own file: a JSON list of records"
    with reading(path, hint) as file:
        try:
            records = json.load(file)
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON ({error})", hint) from None
    if not isinstance(records, list) or not records or not all(isinstance(one, dict) for one in records):
        raise ConfigError(f"{path} is not a list of records", hint)
    return records


def _babilong(task: str, folder: Path | None, lengths: Sequence[int] | None) -> Data:
    """Load `babilong/qa1/4k.json` of each length, as upstream has it, else `qa1.jsonl`, else bAbI's `qa1_*_test.txt`.

    bAbI's training questions are used if there are none for testing.
    """
    if folder is None:
        raise ConfigError(
            f"babilong:{task} has no questions: --data is not given",
            f"get {SOURCES['babilong']}, {_files('babilong', task)} into DIR/babilong, and pass --data DIR",
        )
    place = folder / "babilong"
    whole = [path for path in _places("babilong", task, folder) if path.is_file()]
    babi = [path for kind in ("test", "train") for path in sorted(place.glob(f"{task}_*_{kind}.txt*"))]
    if (place / task).is_dir():
        if lengths is None:
            raise ConfigError(f"BABILong has a file for each length in {place / task}", "pass --length")
        files = {length: place / task / f"{split(length)}.json" for length in lengths}
        at = {n: Data(name=f"{task}/{path.name}", records=_read(path)) for n, path in files.items() if path.is_file()}
        if not at:
            raise ConfigError(f"there is no {next(iter(files.values()))}", "choose a --length that has a file")
        return Data(name=task, records=[], at=at)
    if whole:
        return Data(name=whole[0].name, records=_read(whole[0]))
    if not babi:
        raise _missing("babilong", task, folder)
    (text,) = read_texts(babi[:1])
    return Data(name=text.name, records=stories(text.content, str(babi[0])))


def split(length: int) -> str:
    """Return BABILong's name of a length: 4k for 4096, 1M for 1048576."""
    return f"{length >> 20}M" if length >= 1 << 20 else f"{length // 1024}k"


def _from_hub(suite: str, task: str) -> Data:
    """Read LongBench from a ZIP archive on the hub, L-Eval from one file per task. The hub's cache works offline."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    owner, name = {
        "longbench": ("THUDM/LongBench", "data.zip"),
        "leval": ("L4NLP/LEval", f"LEval/Exam/{task}.jsonl"),
        "longbench-v2": ("THUDM/LongBench-v2", "data.json"),
    }[suite]
    try:
        path = Path(hf_hub_download(owner, name, repo_type="dataset", etag_timeout=5))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError):
        raise ConfigError(
            f"the questions of {suite}:{task} are not on this machine and could not be downloaded",
            f"get {SOURCES[suite]}, {_files(suite, task)} into DIR/{suite}, and pass --data DIR",
        ) from None
    if suite != "longbench":
        return Data(name=path.name, records=_read(path))
    with zipfile.ZipFile(path) as archive:
        raw = archive.read(f"data/{task}.jsonl")
    return Data(name=f"{task}.jsonl", records=[json.loads(line) for line in io.BytesIO(raw) if line.strip()])


def load_texts(name: str, folder: Path | None) -> list[Text]:
    """Load the texts in `FOLDER/NAME`, for perplexity."""
    if folder is None or not (folder / name).is_dir():
        where = "--data is not given" if folder is None else f"there is no folder {folder / name}"
        raise ConfigError(f"ppl:{name} has no texts: {where}", f"put text files into DIR/{name}, and pass --data DIR")
    paths = sorted(path for path in (folder / name).iterdir() if path.is_file())
    if not paths:
        raise ConfigError(f"the folder {folder / name} has no texts", "put text files into it, plain or compressed")
    return read_texts(paths)
