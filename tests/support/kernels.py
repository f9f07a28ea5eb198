"""Kernels that the dispatcher does not see, a model around one, and their launches.

A kernel takes and returns a tensor, without grad.
"""

import ctypes
import math

import numpy as np
import pytest
import torch
from support.fitted import square
from support.zoo import Evaluations
from torch import nn


LAUNCHES = Evaluations()
KERNELS = {}


def kernel(fn):
    note = LAUNCHES.note

    def counted(x):
        note(None)
        return fn(x.detach())

    KERNELS[fn.__name__] = counted
    return counted


def launches(run):
    """Run something; return how many kernels it launched."""
    before = len(LAUNCHES)
    run()
    return len(LAUNCHES) - before


def _launched(address_of):
    """Return a kernel that writes through pointers, as Triton's launchers do."""

    def launch(x):
        x = x.sin()
        out = torch.empty_like(x)
        ctypes.memmove(out.data_ptr(), address_of(x), x.nbytes)
        return out

    return launch


@kernel
def pointers(x):
    return _launched(torch.Tensor.data_ptr)(x)


@kernel
def pointers_to_read(x):
    return _launched(torch.Tensor.const_data_ptr)(x)


@kernel
def storages(x):
    return _launched(lambda x: x.untyped_storage().data_ptr())(x)


@kernel
def numpy(x):
    return torch.from_numpy(np.sin(x.numpy()))


@kernel
def numpy_written(x):
    out = torch.empty_like(x)
    np.sin(x.numpy(), out=out.numpy())
    return out


@kernel
def scipy(x):
    import scipy.special

    return torch.from_numpy(scipy.special.expit(x.numpy()))


@kernel
def item(x):
    return x * x.abs().max().item()


@kernel
def tolist(x):
    return torch.tensor([[math.sin(v) for v in row] for row in x.tolist()])


@kernel
def dlpack(x):
    return torch.from_dlpack(np.sin(np.from_dlpack(x)))


@kernel
def capsule(x):
    shared = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x))
    return shared.sin()


@kernel
def frombuffer(x):
    memory = bytearray(np.sin(x.numpy()).tobytes())
    return torch.frombuffer(memory, dtype=x.dtype).view_as(x)


@kernel
def nonzero(x):  # as a sparse mixture of experts routes
    rows = (x.sum(-1) > 0).nonzero().flatten()
    return torch.zeros_like(x).index_add(0, rows, x[rows].sin())


class Launch(torch.autograd.Function):
    """Launches a kernel in the forward, and in the backward."""

    @staticmethod
    def forward(ctx, x, run):
        ctx.save_for_backward(x)
        ctx.run = run
        return run(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.run(ctx.saved_tensors[0] + 1), None


class Block(nn.Module):
    def __init__(self, run, is_function):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.run, self.is_function = run, is_function

    def forward(self, x):
        y = self.up(x).tanh()
        y = Launch.apply(y, self.run) if self.is_function else y * self.run(y)
        return x + self.down(y.sigmoid().square())


def blocks(run, *, is_function):
    """Return a model of three blocks, and how often a step launches the kernel."""
    parts = nn.Sequential(*(Block(run, is_function) for _ in range(3)))
    return nn.Sequential(nn.Linear(8, 8), parts), 6 if is_function else 3


X = torch.randn(64, 8)


def gradients_and_launches(model):
    """Run a step; return its gradients, and how many kernels it launched."""
    model.zero_grad()
    count = launches(lambda: square(model(X)).backward())
    return [p.grad for p in model.parameters()], count


def build(folder):
    """Build the extension in a folder; skip the test if nothing can."""
    cpp_extension = pytest.importorskip("torch.utils.cpp_extension")
    if not cpp_extension.is_ninja_available():
        pytest.skip("ninja is not installed")
    options = {"no_implicit_headers": True, "extra_cflags": ["-O0"]}
    return cpp_extension.load_inline(
        "remat_kernels", EXTENSION, build_directory=str(folder), **options
    )


# Of an extension: typed, untyped and accessed pointers, and a launch by address.
EXTENSION = r"""
#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>
using at::Tensor;
int64_t launches = 0;
void write(float* to, const float* from, int64_t n) {
  launches++;
  for (int64_t i = 0; i < n; i++) to[i] = 2 * from[i];
}
Tensor typed(const Tensor& x) {
  auto y = at::empty_like(x);
  write(y.data_ptr<float>(), x.const_data_ptr<float>(), x.numel());
  return y;
}
Tensor untyped(const Tensor& x) {
  auto y = at::empty_like(x);
  write((float*)y.data_ptr(), (float*)x.data_ptr(), x.numel());
  return y;
}
Tensor accessed(const Tensor& x) {
  auto y = at::empty_like(x);
  auto from = x.accessor<float, 2>(), to = y.accessor<float, 2>();
  for (int64_t i = 0; i < x.size(0); i++)
    for (int64_t j = 0; j < x.size(1); j++) to[i][j] = 2 * from[i][j];
  launches++;
  return y;
}
void launch(int64_t to, int64_t from, int64_t n) {
  write((float*)to, (const float*)from, n);
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("typed", &typed);
  m.def("untyped", &untyped);
  m.def("accessed", &accessed);
  m.def("launch", &launch);
  m.def("count", []() { return launches; });
}
"""
