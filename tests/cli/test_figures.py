"""`rpe3d figures`: what it writes, and what it refuses."""

from __future__ import annotations

from refusal import refusal

from rpe3d.cli import main


def test_figures_are_written_to_a_folder_that_it_makes(tmp_path, capsys):
    out = tmp_path / "new" / "figures"
    assert main(["figures", "--out", str(out), "--only", "figure-1a, figure-2"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "wrote 11 files" in captured.err
    assert {path.suffix for path in out.iterdir()} == {".csv", ".svg", ".png", ".html"}


def test_an_unknown_figure_is_refused_before_anything_is_made(tmp_path, capsys):
    code, problem, hint = refusal(capsys, "figures", "--out", tmp_path / "new", "--only", "figure-1a,figure-9")
    assert (code, problem) == (1, "figure 'figure-9' is not known")
    assert "figure-2" in hint
    assert not (tmp_path / "new").exists()


def test_the_folder_has_to_be_named(capsys):
    assert refusal(capsys, "figures")[0] == 2


def test_a_file_is_no_folder(tmp_path, capsys):
    (tmp_path / "file").write_text("kept")
    code, problem, _ = refusal(capsys, "figures", "--out", tmp_path / "file", "--only", "figure-1a")
    assert (code, problem) == (1, f"{tmp_path / 'file'} is a file, not a folder")
    assert (tmp_path / "file").read_text() == "kept"
