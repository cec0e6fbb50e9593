"""Launches that skip Triton's examination of arguments may never meet a kernel compiled for other arguments."""

import itertools
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from rpe3d.rotation.launch import Launcher, _kind

CPU = torch.device("cpu")
ROW = torch.zeros(64)


class Kernel:
    """Stands in for a compiled kernel: counts what is compiled, and what is launched from it."""

    def __init__(self):
        self.compiled, self.launched = 0, []

    def __getitem__(self, grid):
        def compile_and_run(*args, **kwargs):
            self.compiled += 1
            return Compiled(self)

        return compile_and_run


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args: self.kernel.launched.append((grid, args))


@pytest.fixture
def kernel():
    return Kernel()


@pytest.fixture
def launcher(kernel):
    made = Launcher(kernel)
    made.interpreted = False
    return made


def test_a_launch_like_an_earlier_one_goes_to_what_was_compiled(kernel, launcher):
    for n in (48, 80):
        launcher(CPU, (n, 1, 1), (ROW, n, None), {"A": 1, "B": 2}, {"num_warps": 4})
    assert kernel.compiled == 1
    assert kernel.launched == [((80, 1, 1), (ROW.data_ptr(), 80, None, 1, 2))]


def test_tensors_that_come_last_are_passed_as_they_are(kernel, launcher):
    """Triton then asks the driver whether the device can read them, which nobody else has."""
    bound = launcher.bind(CPU, (1, 1, 1), (ROW,), {}, {})
    for _ in range(2):
        bound(ROW)
    ((_, (first, rest)),) = kernel.launched
    assert first is ROW
    assert rest == ROW.data_ptr()


KINDS = [1, 16, 17, 2**31, 2**31 + 1, None, 2.0, ROW, ROW[1:], ROW.half(), (1, 16), (1, 17), (ROW,), (ROW[1:],)]


@pytest.mark.parametrize(("a", "b"), list(itertools.combinations(range(len(KINDS)), 2)))
def test_what_triton_compiles_for_is_told_apart(kernel, launcher, a, b):
    for argument in (KINDS[a], KINDS[b]):
        launcher(CPU, (1, 1, 1), (argument,), {}, {})
    assert kernel.compiled == 2


def test_constants_and_options_are_told_apart(kernel, launcher):
    for constant, option in itertools.product((1, 2), (4, 8)):
        launcher(CPU, (1, 1, 1), (ROW,), {"A": constant}, {"num_warps": option})
    assert kernel.compiled == 4


def test_parameters_count_as_tensors():
    assert _kind(torch.nn.Parameter(ROW.clone())) == _kind(ROW)


class Parameter:
    def __init__(self, do_not_specialize):
        self.do_not_specialize = do_not_specialize


@pytest.fixture
def series(kernel, launcher, monkeypatch):
    """Launches of a kernel (tensor, any, whole, number, constant): `whole` is specialized, as a stride is."""
    from rpe3d.rotation import launch

    kernel.params = [Parameter(False), Parameter(True), Parameter(False), Parameter(False)]
    monkeypatch.setattr(Compiled, "function", "f", raising=False)
    monkeypatch.setattr(Compiled, "packed_metadata", "m", raising=False)
    monkeypatch.setattr(Compiled, "run", lambda self, *given: self.kernel.launched.append(given), raising=False)
    monkeypatch.setattr(launch, "_direct", lambda compiled: True)
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda index: "stream"))
    monkeypatch.setattr(launch, "driver", driver)
    return launcher.series(CPU, (ROW,), (2.5,), {"A": 1}, {"num_warps": 4})


def test_a_series_is_compiled_once_for_all_integers_and_grids(kernel, series):
    """Triton's own order: grid, stream, function, metadata, three that hooks have, then the kernel's arguments."""
    for n in (1, 16, 7):
        series((n, 1, 1), n, 32 * n)
    assert kernel.compiled == 1
    assert kernel.launched == [
        (n, 1, 1, "stream", "f", "m", None, None, None, ROW.data_ptr(), n, 32 * n, 2.5, 1) for n in (16, 7)
    ]


def test_a_series_refuses_an_integer_that_triton_would_compile_anew_for(kernel, series):
    series((1, 1, 1), 3, 16)
    for changing in ((3, 24), (2**31, 16)):
        with pytest.raises(ValueError, match="Triton would compile anew"):
            series((1, 1, 1), *changing)
    assert kernel.launched == []


def test_a_series_does_not_begin_with_what_was_compiled_for_one_integer(kernel, series):
    """Triton makes a constant of 1; what it compiled then is for no other number."""
    for whole in (1, 16, 32):
        series((1, 1, 1), 3, whole)
    assert kernel.compiled == 2
    assert [given[11] for given in kernel.launched] == [32]


def test_a_series_in_the_interpreter_is_launch_by_launch(kernel):
    launcher = Launcher(kernel)
    assert launcher.interpreted
    several = launcher.series(CPU, (ROW,), (2.5,), {"A": 1}, {})
    for n in (1, 2):
        several((n, 1, 1), n, 3)
    assert kernel.compiled == 2
