"""Files of records: what is read, what is refused, and what a kill leaves."""

from __future__ import annotations

import gzip
import json
import lzma

import pytest

from rpe3d.config import ConfigError
from rpe3d.evaluate.tasks.predictions import Predictions, append, kept, read_records
from rpe3d.evaluate.tasks.questions import load, load_texts

RECORDS = [{"pred": "one\ntwo\u2028three\x85", "answers": ["ä"]}, {"pred": "", "answers": []}]


@pytest.mark.parametrize(("name", "opener"), [("a.jsonl", open), ("a.jsonl.xz", lzma.open), ("a.jsonl.gz", gzip.open)])
def test_lines_end_at_line_feeds_alone(tmp_path, name, opener):
    """U+2028 and U+0085, which Python's `splitlines` takes for ends, may stand in a JSON text."""
    with opener(tmp_path / name, "wb") as file:
        file.write("\r\n".join(json.dumps(r, ensure_ascii=False) for r in RECORDS).encode() + b"\n\n")
    assert read_records(tmp_path / name) == RECORDS


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b'{"a": 1}\n{"a": "\xff"}\n', r"line 2 of .* is not UTF-8 \(byte 7 is 0xff\)"),
        (b'{"a": 1}\n\n{"a": \n', "line 3 of .* is not JSON"),
        (b"[1]\n", "line 1 of .* is not a JSON object"),
    ],
)
def test_what_is_no_record_is_named_by_its_line(tmp_path, raw, problem):
    (tmp_path / "a.jsonl").write_bytes(raw)
    with pytest.raises(ConfigError, match=problem):
        read_records(tmp_path / "a.jsonl")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        read_records(tmp_path / "none.jsonl")


def test_lines_are_added_and_a_torn_one_is_taken_off(tmp_path):
    file = tmp_path / "new" / "a.jsonl"
    assert kept(file) == []
    append(file, RECORDS[:1])
    append(file, RECORDS[1:])
    assert kept(file) == RECORDS
    with open(file, "ab") as torn:
        torn.write(b'{"pred": "tor')
    assert kept(file) == RECORDS
    assert read_records(file) == RECORDS


def test_data_are_found_in_the_suites_folder_or_beside_and_whole_before_mini(tmp_path):
    for place, context in (("longbench/lcc.mini.jsonl", "mini"), ("lcc.jsonl", "whole")):
        append(tmp_path / place, [{"context": context}])
    assert load("longbench", "lcc", tmp_path).records == [{"context": "whole"}]
    (tmp_path / "lcc.jsonl").unlink()
    mini = load("longbench", "lcc", tmp_path)
    assert (mini.name, mini.records) == ("lcc.mini.jsonl", [{"context": "mini"}])


def test_data_that_are_not_there_say_what_to_get_and_where_to_put_it(tmp_path):
    append(tmp_path / "coursera.jsonl", [{"input": "x"}])
    with pytest.raises(
        ConfigError, match=r"has no questions of longbench:lcc; it has coursera.jsonl: get `data.zip` of"
    ):
        load("longbench", "lcc", tmp_path)
    with pytest.raises(ConfigError, match="there is no folder"):
        load("longbench", "lcc", tmp_path / "none")
    with pytest.raises(
        ConfigError, match=r"ppl:pg19 has no texts: there is no folder .*: put text files into DIR/pg19"
    ):
        load_texts("pg19", tmp_path)


def test_without_a_folder_and_without_the_hub_the_same_is_said(monkeypatch):
    import huggingface_hub

    def unreachable(*_, **__):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(
        ConfigError,
        match="are not on this machine and could not be downloaded: get the closed-ended tasks",
    ):
        load("leval", "tpo", None)


def test_longbench_is_read_out_of_the_hubs_archive(tmp_path, monkeypatch):
    import zipfile

    import huggingface_hub

    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/lcc.jsonl", '{"context": "x"}\n{"context": "y"}\n')
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: str(tmp_path / "data.zip"))
    assert load("longbench", "lcc", None).records == [{"context": "x"}, {"context": "y"}]


def test_a_prediction_without_its_number_is_refused(tmp_path):
    earlier = Predictions(path=tmp_path / "p.jsonl", made_from="x")
    earlier.append([{"index": 0, "pred": "a"}])
    assert [record["index"] for record in earlier.kept()] == [0]
    earlier.append([{"pred": "b"}])
    with pytest.raises(ConfigError, match=r"line 2 of .*p\.jsonl is damaged: it has no 'index'"):
        earlier.kept()
