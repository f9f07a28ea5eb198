"""torch's own kernels draw the stream where they agree with ours, and only there."""

import pytest
import torch
from support.draws import FLOATS, LAST, MANY, ONE, RAW_DRAWS
from support.tables import rows
from torch.func import vmap

from remat.random import _ops, _philox
from remat.testing import assert_same


class Agreeing:
    """As `torch.func._random`, with kernels that count their calls."""

    def __init__(self):
        self.calls = []

    def split(self, k, num):
        self.calls.append("split")
        return _philox.split(k.reshape(-1, 2), num).view(num, *k.shape)

    def uniform_(self, k, out):
        self.calls.append("uniform_")
        self._fill(k, out, _philox.UNIFORM)

    def normal_(self, k, out):
        self.calls.append("normal_")
        self._fill(k, out, _philox.NORMAL)

    @staticmethod
    def _fill(k, out, readings):
        # What torch's kernels ask of a batch of keys.
        assert k.ndim == 1 or k.ndim == out.ndim + 1
        assert k.is_contiguous()
        assert out.numel()
        reading = readings[out.dtype]
        rows = k.reshape(-1, 2)
        out.copy_(_philox.draw(rows, out.shape[-1], out.dtype, reading).view(out.shape))


@pytest.fixture
def native(monkeypatch):
    """Put a module in the place of `torch.func._random`, as if it had CPU kernels."""

    def put(module):
        monkeypatch.setattr(_ops, "native_random", lambda _device: module)
        _ops._native.cache_clear()
        return module

    yield put
    _ops._native.cache_clear()


def everything():
    return [
        _ops.split(MANY.view(2, 3, 2), 4),
        _ops.split(ONE, 2),
        _ops.fold_in(MANY, LAST),
        _ops.fold_in(MANY, torch.arange(6)),
        *[_ops.uniform(MANY.view(2, 3, 2), 5, d) for d in FLOATS],
        *[_ops.uniform(ONE, 700, d) for d in FLOATS],
        _ops.normal(MANY, 5, torch.float32),
        vmap(lambda k: _ops.uniform(k, 3, torch.float32))(MANY),
    ]


def test_kernels_of_torch_are_used_where_they_agree(native):
    want = everything()
    fake = native(Agreeing())
    _ops.split(ONE, 1)
    tested = len(fake.calls)
    assert_same(everything(), want)
    later = fake.calls[tested:]
    assert later.count("split") == 3
    assert later.count("uniform_") == 9
    assert "normal_" not in later  # on the CPU it is ours
    assert _ops._native.cache_info().misses == 1


def test_kernels_of_torch_are_given_what_they_take(native):
    apart = MANY[::2]
    u = _ops.uniform(MANY, 2, torch.float32)
    fake = native(Agreeing())
    assert torch.equal(_ops.split(apart, 3)[0], _ops.fold_in(apart, 0))
    assert torch.equal(_ops.uniform(apart, 2, torch.float32), u[::2])
    assert _ops.uniform(MANY, 0, torch.float32).shape == (6, 0)
    assert _ops.split(MANY, 0).shape == (0, 6, 2)
    assert {"split", "uniform_"} <= {*fake.calls}
    assert _ops._native.cache_info().misses == 1


class Shifted(Agreeing):
    def split(self, k, num):
        return super().split(k, num + 1)[1:]


class Raises(Agreeing):
    def uniform_(self, k, out):
        raise RuntimeError("not implemented")


class Changed(Agreeing):
    def uniform_(self, k, out, low):
        """Take an argument more than it did."""


class Rounded(Agreeing):
    def uniform_(self, k, out):
        super().uniform_(k, out)
        out.mul_(1 - 2.0**-20)


class Gaussian(Agreeing):
    def normal_(self, k, out):
        super().normal_(k, out)
        out.mul_(2)


@pytest.mark.parametrize(
    "module", [Shifted(), Raises(), Changed(), Rounded(), Gaussian(), None, object()]
)
def test_kernels_of_torch_that_disagree_are_not_used(native, module):
    want = everything()
    native(module)
    assert_same(everything(), want)
    assert _ops._native(torch.device("cpu")) is None


@pytest.mark.gpu
@rows("draw", RAW_DRAWS)
def test_a_gpu_draws_the_same_numbers(draw):
    got, want = draw(MANY.cuda(), 3_000).cpu(), draw(MANY, 3_000)
    if "normal" in str(getattr(draw, "func", "")):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    else:
        assert torch.equal(got, want)
