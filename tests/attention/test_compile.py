"""Kernels that Triton's interpreter runs must also compile: for a Hopper GPU, which a machine without one can do."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.device_count() > 0, reason="a GPU is there, for which other tests compile them"),
]

COMPILE = '''
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rpe3d.rotation import launch

TYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "int64": "i64", "int32": "i32", "int16": "i16"}


def typed(x, at, constants, aligned):
    """Return what Triton is told of an argument, in tuples as well: its type, where it is 1, or aligned."""
    if isinstance(x, tuple):
        return tuple(typed(y, (*at, i), constants, aligned) for i, y in enumerate(x))
    if isinstance(x, torch.Tensor):
        aligned[at] = [["tt.divisibility", 16]]
        return "*" + TYPES[str(x.dtype)[6:]]
    if x is None or (x == 1 and len(at) > 1):
        constants[at] = x
        return "constexpr"
    return "fp32" if isinstance(x, float) else "i32"


def compile(bound, *first):
    """Compile a launch in the place of launching it."""
    function = bound.launcher.kernel
    names = [parameter.name for parameter in function.params]
    given = dict(zip(names, [*first, *bound.arguments]))
    constants, aligned = {(names.index(name),): x for name, x in bound.constants.items()}, {}
    signature = {
        name: typed(given[name], (i,), constants, aligned) if name in given else "constexpr"
        for i, name in enumerate(names)
    }
    source = ASTSource(function, signature, constants, aligned)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options=bound.options)
    print("compiled", function.__name__)


launch.Bound.__call__ = compile

from rpe3d.attention import Memory
from rpe3d.attention.chosen import backward, far, select, step
from rpe3d.testing import random_problem, small_law

own = {"chunk": 32, "window": 64, "reach": 160, "focus": 0, "fade": 0, "sinks": 0, "far": 5, "block": 16}
law = small_law("3d-rpe", pretrained=256, context=4096, head_dim=64, **own)
x = random_problem(law, h=4, g=2, t=1, s=400, dtype=torch.bfloat16)
step.Step(x, splits=2)(x.q, x.k, x.v, None, Memory())
step.Step(x, trusted=True)(x.q, x.k, x.v, None, Memory())
x = random_problem(law, h=4, g=2, t=400, s=400, dtype=torch.bfloat16)
selection = select.Selection(law, 16, x.q.device)
queries = range(96, 400)
unions = selection.room(1, 2, queries, x.q.device)
found = selection.summaries(x.k, selection.choosable(399))
work = [(queries, [queries])]
selection.unite(unions, x.q, x.k, found[1], found[0], work, first=96, there=range(x.q.shape[2]))
far.attend(selection, unions, x.q, x.k, x.v, x.q.clone(), torch.zeros(1, 4, 400), first=96, query_start=0, scale=0.1)
some = x.q, x.k, x.v, x.q, torch.zeros(1, 4, 400), torch.zeros(1, 4, 400)
backward.for_queries(selection, unions, *some, first=96, scale=0.1)
sums = torch.zeros(x.k.shape), torch.zeros(x.k.shape)
backward.for_keys(selection, backward.inverse(unions, 18), *some, *sums, first=96, scale=0.1)
x = random_problem(law, h=4, g=1, t=400, s=400, dtype=torch.bfloat16)
select.DIRECT = 0  # groups of blocks, and tiles of two halves
halved = select.Selection(law, 32, x.q.device, 2)
lists = halved.room(1, 1, queries, x.q.device)
work = [(queries, [queries])]
halved.unite(lists, x.q, x.k, found[1], found[0], work, first=96, there=range(x.q.shape[2]))
far.attend(halved, lists, x.q, x.k, x.v, x.q.clone(), torch.zeros(1, 4, 400), first=96, query_start=0, scale=0.1)
'''

PAGED = (
    COMPILE.split("from rpe3d.attention import Memory")[0]
    + """
from rpe3d.attention.decode import kernel, paged
from rpe3d.testing import random_problem, small_law

for name in ("3d-rpe", "dca"):
    law = small_law(name, context=4096)
    cache = torch.zeros(9, 16, 2, 64, dtype=torch.bfloat16)
    for splits in (1, 3):
        made = paged.Steps(law, torch.device("cpu"), sequences=4, heads=6, groups=2, splits=splits)
        q = torch.zeros(4, 6, 1, 64, dtype=torch.bfloat16)
        numbers = torch.zeros(4, 9, dtype=torch.int32)
        made(q, cache, cache, torch.empty_like(q), pages=numbers, lengths=numbers[:, 0].contiguous(), scale=0.1)
        x = random_problem(law, t=1, s=400, dtype=torch.bfloat16)
        kernel.Step(x, splits=splits)(x.q, x.k, x.v, None)
"""
)

CHOSEN = (
    COMPILE.split("x = random_problem(law, h=4, g=2, t=1")[0]
    + """
from rpe3d.attention.chosen import paged

for dim, rotary in ((64, 64), (128, 96)):
    law = small_law("3d-rpe", pretrained=256, context=4096, head_dim=dim, rotary_dim=rotary, **own)
    cpu, numbers = torch.device("cpu"), torch.zeros(4, 260, dtype=torch.int32)
    for page, splits in ((16, 3), (64, 1)):
        made = paged.Steps(law, cpu, sequences=4, heads=6, groups=2, longest=4096, page=page, splits=splits)
        size = made.layout.padded(page * 2 * 2 * dim * 2, 2, dim) // 2
        cache = torch.zeros(9, size, dtype=torch.bfloat16)[:, : page * 4 * dim].unflatten(1, (page, 2, 2 * dim))
        k, v = cache.split(dim, dim=-1)
        kept = made.layout.behind(cache, page * 2 * 2 * dim * 2, 2, dim)
        q, lengths = torch.zeros(4, 6, 1, dim, dtype=torch.bfloat16), numbers[:, 0].contiguous()
        starts, slots = torch.zeros(5, dtype=torch.int32), torch.zeros(9, dtype=torch.int64)
        made.summarize(k, kept, pages=numbers, starts=starts, lengths=lengths, slots=slots, most=9)
        made.summarize(k, kept, pages=numbers, starts=starts, lengths=lengths, slots=slots, most=1)
        made(q, k, v, torch.empty_like(q), kept, pages=numbers, lengths=lengths, scale=0.1)
"""
)

ADDED = (
    COMPILE.split("from rpe3d.attention import Memory")[0]
    + """
from rpe3d.attention.merge import Part, kernel

whole, some = torch.zeros(1, 2, 40, 64, dtype=torch.bfloat16), torch.zeros(2, 2, 8, 64, dtype=torch.bfloat16)
parts = [Part(whole, whole), Part(some, some, 1, 16), Part(some, some, 0, 16, flipped=True)]
table = torch.zeros(40, 32), torch.zeros(40, 32)
for interleaved in (False, True):
    kernel.add_up(parts, whole, parts, table, interleaved=interleaved)
kernel.add_up(parts, whole.float())
"""
)


def compiled(program):
    """Return the kernels that a program compiles for a Hopper GPU, each as often as it does."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-2000:]
    return [line.split()[1].removesuffix("_kernel") for line in run.stdout.splitlines()]


def test_the_decoding_kernels_compile_for_a_gpu():
    """With pages and without, split and whole: what a server captures in CUDA graphs."""
    assert compiled(PAGED) == ["_paged", "_decode"] * 4


def test_the_kernels_of_a_choice_compile_for_a_gpu():
    """A variable that changes its type, or two returns of which one does not fit, the interpreter does not mind."""
    kernels = {"_centre", "_score", "_choose", "_attend", "_means", "_turns", "_aims", "_levels", "_marks", "_unions"}
    gradient = {"_far", "_queries", "_words", "_lists", "_keys"}
    assert set(compiled(COMPILE)) == kernels | gradient


def test_the_kernels_of_a_choice_over_pages_compile_for_a_gpu():
    """Split and whole, with dimensions that are not rotated and without: what a server captures in CUDA graphs."""
    assert compiled(CHOSEN) == ["_written", "_written", "_written", "_score", "_choose", "_attend"] * 4


def test_the_sum_of_gradients_compiles_for_a_gpu():
    """With parts that are turned back, in pairs of either layout, and without."""
    assert compiled(ADDED) == ["_add"] * 3
