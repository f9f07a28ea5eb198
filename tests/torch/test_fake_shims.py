"""What the shims of `fakes` expect of torch.

Invariant: a check fails where a name of it is missing or does something else.
"""

import torch
from support.shims import expects
from torch import Tensor, nn

from remat._torch import tensors


@expects("NO_VALUES")
def test_fakes_have_no_values():
    with tensors.fake_mode():
        for read in (Tensor.item, Tensor.nonzero):
            try:
                read(torch.ones(()))
            except tensors.NO_VALUES:
                continue
            raise AssertionError("a value was given")


@expects("empty_in")
def test_a_fake_is_like_a_tensor():
    x = torch.ones(2, 3).t()
    made = tensors.empty_in(tensors.fake_mode(), x)
    assert tensors.is_fake(made)
    assert (made.shape, made.stride(), made.dtype) == (x.shape, x.stride(), x.dtype)


@expects("copied_as_fake", "fake_mode", "is_fake")
def test_copies_are_fake():
    mode, cpu = tensors.fake_mode(), torch.device("cpu")
    w = nn.Parameter(torch.ones(2, 3))
    meta = nn.Parameter(torch.ones(2, 3, device="meta"), requires_grad=False)
    found = tensors.copied_as_fake([w, w, w.detach()[0], meta], mode, cpu)
    assert found[0] is found[1]
    _is_copy(found[0], w)
    _is_copy(found[3], meta)
    assert found[2].untyped_storage()._cdata == found[0].untyped_storage()._cdata
    again = tensors.copied_as_fake(found[0], tensors.fake_mode(), cpu)
    _is_copy(again, found[0])
    with mode:
        made = found[0] @ torch.ones(3, 1) + w[:, :1]
    assert tensors.is_fake(made)
    assert made.untyped_storage().nbytes() == 8


def _is_copy(copy, tensor):
    assert tensors.is_fake(copy)
    assert not tensors.is_fake(torch.ones(2))
    assert isinstance(copy, nn.Parameter)
    assert copy.requires_grad == tensor.requires_grad
    assert (copy.device.type, copy.shape) == ("cpu", tensor.shape)
