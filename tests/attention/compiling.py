"""Compile every kernel of the package for a GPU, on a machine without one: python tests/attention/compiling.py

Triton's interpreter runs what its compiler refuses, such as a number that is int32 before a loop and int64 in it. Here
nothing runs: each launch of the calls below is compiled, for heads of 128 in bfloat16, and says its shared memory.
"""

from __future__ import annotations

import os
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from rpe3d import make_law
from rpe3d.rotation import launch

HOPPER = GPUTarget("cuda", 90, 32)
DEVICE = torch.device("cpu")
LAWS = {
    "3d-rpe": {"pretrained": 256, "context": 4096, "head_dim": 128, "chunk": 32},
    "dca": {"pretrained": 256, "context": 4096, "head_dim": 128},
    "chosen": {"pretrained": 256, "context": 4096, "head_dim": 128, "chunk": 32, "window": 64, "reach": 160, "far": 5},
}
compiled: dict[str, int] = {}


class Driver:
    """What the compiler asks of a driver."""

    def get_current_target(self):
        return HOPPER

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_active_torch_device(self):
        return DEVICE


def compile_only(self, *first):
    """Compile what `Bound` would launch."""
    kernel = self.launcher.kernel
    made = kernel.warmup(*first, *self.arguments, grid=self.grid, **self.constants, **self.options)
    compiled[kernel.__name__] = max(compiled.get(kernel.__name__, 0), made.metadata.shared)


def each_launch(self, grid, *changing):
    """Launch a member of a series by itself."""
    given = (*self.before, *changing, *self.after)
    self.launcher.bind(self.device, grid, given, self.constants, self.options)()


def law(name):
    return make_law("3d-rpe" if name == "chosen" else name, **LAWS[name])


def vectors(heads, tokens, batch=1):
    return torch.zeros(batch, tokens, heads, 128, dtype=torch.bfloat16).transpose(1, 2)


def problem(name, queries, keys, *, batch=1):
    from rpe3d.attention.problem import check

    q, (k, v) = vectors(8, queries, batch), (vectors(2, keys, batch) for _ in range(2))
    where = {"query_positions": range(keys - queries, keys), "key_positions": range(keys)}
    return check(q, k, v, law(name), rotated=True, **where)


def decoding():
    from rpe3d.attention.decode import kernel, paged

    for name in ("3d-rpe", "dca"):
        x = problem(name, 1, 600)
        kernel.Step(x)(x.q, x.k, x.v, None)
        cache = torch.zeros(64, 2, 16, 256, dtype=torch.bfloat16).transpose(1, 2)
        lengths, pages = torch.tensor([600, 30], dtype=torch.int32), torch.zeros(2, 64, dtype=torch.int32)
        paged.attend(vectors(8, 1, 2), *cache.split(128, -1), law(name), pages=pages, lengths=lengths, scale=0.1)


def prompts():
    from rpe3d.attention import prefill
    from rpe3d.attention.merge import Part, kernel
    from rpe3d.attention.spans import spans
    from rpe3d.rotation import cos_sin, table_kernel
    from rpe3d.rotation import kernel as rotation

    for name in ("3d-rpe", "dca"):
        x = problem(name, 300, 300)
        prefill.Step(x, list(spans(x)))(x.q, x.k, x.v, None)
    out, lse = vectors(8, 300), torch.zeros(1, 8, 300)
    kernel.INTERPRETED = True  # else it wants vectors on a GPU
    kernel.merge([Part(out, lse), Part(out.clone(), lse.clone())], out.clone(), lse.clone(), None, None)
    kernel.add_up([Part(out, out)], out.clone())
    frequencies = law("3d-rpe").frequencies()
    table_kernel.table(law("3d-rpe").regions[1].query, range(300), frequencies)
    rotation.launch([out], *cos_sin(torch.zeros(300, 64, dtype=torch.float64)))


def choosing():
    from rpe3d.attention import chosen
    from rpe3d.attention.chosen import step
    from rpe3d.attention.chosen.paged import Steps

    x = problem("chosen", 300, 300)
    given = [y.clone().requires_grad_() for y in (x.q, x.k, x.v)]
    out, _ = chosen.Kernels(x)(*given, None)
    out.sum().backward()
    x = problem("chosen", 1, 600)
    step.Step(x)(x.q, x.k, x.v, None)
    steps = Steps(x.law, DEVICE, sequences=2, heads=8, groups=2, longest=1024, page=16)
    keys, values = (torch.zeros(64, 16, 2, 128, dtype=torch.bfloat16) for _ in range(2))
    kept, starts = steps.layout.empty(64, 2, 128, DEVICE), torch.tensor([0, 1, 2], dtype=torch.int32)
    where = {"pages": torch.zeros(2, 64, dtype=torch.int32), "lengths": torch.tensor([600, 30], dtype=torch.int32)}
    for most in (1, 64):
        steps.summarize(keys, kept, starts=starts, slots=torch.zeros(2, dtype=torch.long), most=most, **where)
    q = vectors(8, 1, 2)
    steps(q, keys, values, torch.empty_like(q), kept, scale=0.1, **where)


def main():
    driver.set_active(Driver())
    with (
        mock.patch.object(launch.Bound, "__call__", compile_only),
        mock.patch.object(launch.Series, "__call__", each_launch),
    ):
        for part in (decoding, prompts, choosing):
            part()
    for name, shared in sorted(compiled.items()):
        print(name, shared)


if __name__ == "__main__":
    main()
