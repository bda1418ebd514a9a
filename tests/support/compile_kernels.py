"""Compile every kernel for compute capability 9.0 on a machine without a GPU.

Each launch becomes a compilation; the host code around it runs unchanged.
"""

from __future__ import annotations

import os

os.environ.pop("TRITON_INTERPRET", None)

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kronbit import Shampoo, rules
from kronbit.blocks.batches import UPDATE, batches, due_parts
from kronbit.blocks.blocking import route
from kronbit.blocks.groups import Due, Member
from kronbit.config import Config
from kronbit.gpu.addresses import AddressTable
from kronbit.gpu.measured import Measured
from kronbit.gpu.norms import KernelNorms
from kronbit.gpu.ordinary_step import GroupedProducts
from kronbit.gpu.precision import Precision
from kronbit.kernels import compact, guard, replacement
from kronbit.kernels import quantization as quantiser
from kronbit.kernels.cholesky import factor_, inverse_factor_
from kronbit.kernels.matmul import compose, correction, multiply
from kronbit.kernels.split import (
    column_dots,
    normalise_columns,
    scale_rows,
    split,
)
from kronbit.linalg.roots import converged_inverse_root, power_iteration
from kronbit.quantization import reference
from kronbit.statistics import GradientStatistics
from kronbit.step.preconditioner import Preconditioner
from kronbit.step.warm_up import warm_up

CPU = torch.device("cpu")


class FakeDriver:
    """A driver without a device, with the methods that the compiler calls."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


compiled: set[str] = set()
launch = JITFunction.run


def compile_only(self, *args, grid, warmup, **options):  # type: ignore[no-untyped-def]
    kernel = launch(self, *args, grid=grid, warmup=True, **options)
    if kernel is not None and kernel.asm["ptx"] not in compiled:
        compiled.add(kernel.asm["ptx"])
        units = "wgmma" if "wgmma" in kernel.asm["ptx"] else ""
        print(self.__name__, units, "shared", kernel.metadata.shared)


def launch_matrix_kernels(n: int) -> None:
    """Launch the kernels that work on stacks of matrices of order n."""
    for bits in (3, 4, 6, 8):
        X, code_format = torch.randn(1, n, n), reference.CodeFormat(bits, "linear2", 64)
        codes, scales, diagonal = quantiser.encode(X, True, code_format)
        quantiser.decode(codes, scales, diagonal, code_format)
        quantiser.encode(X.mT, False, code_format)
        quantiser.decode(codes, scales, None, code_format)
        quantiser.decode_operand([(codes, scales)], n, code_format)
        for block, tiled in ((64, True), (32, True), (64, False)):
            scales = compact.block_scales(X, True, block, tiled)
            code_format = reference.CodeFormat(bits, "linear2", block)
            codes = compact.nearest_codes(X, scales, True, code_format, tiled)
            scale_codes, tops = reference.quantize_scales(scales)
            for mirrored in (True, False):
                compact.decode(codes, scale_codes, tops, torch.ones(1, n), mirrored, code_format)
        compact.round_scales_(torch.ones(1, 300))
        scales = compact.block_scales(X.mT, False, 64, False)
        codes = compact.nearest_codes(X.mT, scales, False, code_format, False)
        compact.decode(codes, *reference.quantize_scales(scales), None, False, code_format)
    for bound in (1.0, torch.ones(1), None):
        a = split(torch.randn(1, n, n), bound)
    multiply(a, a)
    multiply(a, a.mT, symmetric=True)
    multiply(a, a.mT, symmetric=True, triangular=True)
    multiply(a.mT, a, symmetric=True)
    multiply(a, a, C=torch.zeros(1, n, n))
    compose(a, a, C=a)
    compose(a.mT, a, C=torch.zeros(1, n, n), symmetric=True, bound=torch.ones(1))
    compose(a, a.mT, symmetric=True)
    correction(a)
    normalise_columns(torch.randn(1, n, n))
    scale_rows(a, torch.ones(1, n), torch.ones(1))
    column_dots(torch.randn(1, n, n), torch.randn(1, n, n))
    power_iteration(torch.randn(1, n, n))
    for count in range(1, replacement.MOST + 1):
        for size in (4 * n, n):
            old = [torch.ones(2, n), *[torch.zeros(2, size, dtype=torch.uint8)] * (count - 1)]
            replacement.replace_rows_(old, old, torch.ones(2, dtype=torch.bool))
    for orders in (None, torch.ones(1, dtype=torch.int32)):
        converged_inverse_root(torch.eye(n).unsqueeze(0).contiguous(), 4, 1e-6, orders)
    factor_(torch.eye(n).unsqueeze(0).contiguous())
    inverse_factor_(torch.eye(n).unsqueeze(0).contiguous(), 0.0, torch.ones(1, dtype=torch.bool))


def main() -> None:
    driver.set_active(FakeDriver())
    JITFunction.run = compile_only
    guard.why_not = lambda device: None
    launch_matrix_kernels(97)
    before = len(compiled)
    for n in (64, 33, 130):
        launch_matrix_kernels(n)
    assert len(compiled) == before, "a kernel was specialised on the value of an integer"
    grads = [torch.zeros(70, 66), torch.zeros(12, 40)]
    addresses = AddressTable(2, CPU)
    addresses.fill(grads)
    norms = KernelNorms([grad.numel() for grad in grads], CPU)
    for count in (True, False):
        norms.measure(addresses.tensor, torch.zeros((), dtype=torch.int64), count)
    norms.zero_nonfinite(addresses.tensor)
    for rule in (rules.KRONECKER, rules.CASPR):
        for bits, storage in ((4, "paper"), (3, "paper"), (32, "paper"), (4, "compact")):
            config = Config(bits=bits, storage=storage, max_order=100)
            members = [Member(route(tuple(grad.shape), config), config) for grad in grads]
            preconditioner = Preconditioner(members, rules.Algorithm(rule), 2**20, False, CPU)
            stacks = preconditioner.stacks
            finite, due = torch.ones(2, dtype=torch.bool), {i: Due(config) for i in (0, 1)}
            measured = Measured(grads, norms.norms, finite, addresses, by_kernels=True)
            for parts in batches(due_parts(stacks.groups, due), stacks.workspace, UPDATE):
                GradientStatistics().outer_products(stacks, measured, due)(parts)
            direct = Precision(False, direct=not rule[0].left)
            for precision in (Precision(False), direct, Precision(True)):
                products = GroupedProducts(stacks, {0, 1}, precision)
                products.step(addresses)
            products.compare(addresses, norms.norms, direct)
    for dtype in (torch.float32, torch.bfloat16):
        check_that_warm_up_compiles_everything(dtype)


def check_that_warm_up_compiles_everything(dtype: torch.dtype) -> None:
    shapes = ((320, 64), (64, 512), (8,))
    params = [torch.nn.Parameter(torch.randn(*shape, dtype=dtype)) for shape in shapes]
    every = {"update_every": 1, "refresh_every": 1}
    optimizer = Shampoo(params, base="sgd", lr=0.1, workspace_mb=0.25, **every)  # several waves
    warm_up(CPU, Shampoo.algorithm, optimizer.config, dtype)
    before = len(compiled)
    for _ in range(2):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    assert len(compiled) == before, "a kernel was compiled after the warm-up"


if __name__ == "__main__":
    main()
