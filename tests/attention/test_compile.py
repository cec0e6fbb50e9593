"""Kernels that Triton's interpreter runs must also compile: for a Hopper GPU, which a machine without one can do."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

COMPILE = '''
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rpe3d.rotation import launch

TYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "int64": "i64", "int32": "i32", "int16": "i16"}


def compile(bound, *first):
    """Compile a launch in the place of launching it."""
    function = bound.launcher.kernel
    names = [parameter.name for parameter in function.params]
    given = dict(zip(names, [*first, *bound.arguments]))
    constants = {**bound.constants, **{name: None for name, x in given.items() if x is None}}
    signature, aligned = {}, {}
    for i, name in enumerate(names):
        x = given.get(name)
        if name in constants:
            signature[name] = "constexpr"
        elif isinstance(x, torch.Tensor):
            signature[name], aligned[(i,)] = "*" + TYPES[str(x.dtype)[6:]], [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(x, float) else "i32"
    source = ASTSource(function, signature, {(names.index(n),): x for n, x in constants.items()}, aligned)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options=bound.options)
    print("compiled", function.__name__)


launch.Bound.__call__ = compile

from rpe3d.attention import Memory
from rpe3d.attention.chosen import far, select, step
from rpe3d.testing import random_problem, small_law

own = {"chunk": 32, "window": 64, "reach": 160, "focus": 0, "fade": 0, "sinks": 0, "far": 5, "block": 16}
law = small_law("3d-rpe", pretrained=256, context=4096, head_dim=64, **own)
x = random_problem(law, h=4, g=2, t=1, s=400, dtype=torch.bfloat16)
step.Step(x, splits=2)(x.q, x.k, x.v, None, Memory())
x = random_problem(law, h=4, g=2, t=400, s=400, dtype=torch.bfloat16)
selection = select.Selection(law, 16, x.q.device)
queries = range(96, 400)
unions = selection.room(1, 2, queries, x.q.device)
found = selection.summaries(x.k, selection.choosable(399))
selection.unite(unions, x.q, x.k, *found, queries, first=96, start=0)
far.attend(selection, unions, x.q, x.k, x.v, x.q.clone(), torch.zeros(1, 4, 400), first=96, query_start=0, scale=0.1)
'''


def test_the_kernels_of_a_choice_compile_for_a_gpu():
    """A variable that changes its type, or two returns of which one does not fit, the interpreter does not mind."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-2000:]
    kernels = {"_aim", "_score", "_choose", "_attend", "_means", "_aims", "_levels", "_cuts", "_unions", "_far"}
    assert {line.split()[1].removesuffix("_kernel") for line in run.stdout.splitlines()} == kernels
