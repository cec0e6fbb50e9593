"""The folder of a run: one writer, whole checkpoints, and no other run's."""

from __future__ import annotations

import pytest

from rpe3d.config import ConfigError
from rpe3d.train import folder


def test_the_last_checkpoint_is_by_number_and_unfinished_ones_do_not_count(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10", ".unfinished/checkpoint-11", "checkpoint-x"):
        (tmp_path / name).mkdir(parents=True)
    assert [path.name for path in folder.checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10"]
    folder.sweep(tmp_path)
    folder.forget_old(tmp_path, kept=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-x"]


def test_a_second_run_in_a_folder_is_refused(tmp_path):
    with folder.locked(tmp_path), pytest.raises(ConfigError, match="another run is writing"), folder.locked(tmp_path):
        pass
    with folder.locked(tmp_path):
        pass


def test_another_run_and_other_files_are_left_alone(tmp_path):
    (tmp_path / "new").mkdir()
    folder.check_run(tmp_path / "new", {"seed": 0, "law": "rope"})
    folder.write_json(tmp_path / "new" / folder.ASKED, {"seed": 0, "law": "rope"})
    folder.check_run(tmp_path / "new", {"seed": 0, "law": "rope"})
    with pytest.raises(ConfigError, match="holds a run that differs in law, seed"):
        folder.check_run(tmp_path / "new", {"seed": 1, "law": "yarn"})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    with pytest.raises(ConfigError, match="holds no run"):
        folder.check_run(tmp_path / "mine", {})
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["file"]


def test_a_folder_that_cannot_be_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write to .*file"), folder.locked(tmp_path / "file"):
        pass
