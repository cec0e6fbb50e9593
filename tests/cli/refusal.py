"""What the command line says when it refuses."""

from __future__ import annotations

from rpe3d.cli import main


def refusal(capsys, *argv):
    """The exit code, the problem and the hint; nothing goes to stdout."""
    code = main([*map(str, argv)])
    captured = capsys.readouterr()
    assert captured.out == ""
    problem, hint = captured.err.splitlines()[-2:]
    return code, problem.removeprefix("error: "), hint.removeprefix("hint: ")
