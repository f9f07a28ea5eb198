"""Formulas that choose kernels by grad mode: the same under torch.func as in plain."""

import pytest
import torch
from support.transforms import some
from support.zoo import assert_rematerialized, make
from torch import nn
from torch.nn import functional as F  # noqa: N812


LSTM = nn.LSTM(6, 6)
KERNELS = {
    "silu": F.silu,
    "mish": F.mish,
    "gelu": F.gelu,
    "group_norm": lambda x: F.group_norm(x, 2) ** 3,
    "logit": lambda x: (x.sigmoid() / 2).logit(),
    "cumprod": lambda x: x.cumprod(-1),
    "solve": lambda x: torch.linalg.solve(x[..., :4] + 3 * torch.eye(4), x),
    "det": lambda x: torch.linalg.det(x[..., :4] + torch.eye(4)),
    "weight_norm": lambda x: torch._weight_norm(
        x.view(20, -1), x.detach().view(20, -1).norm(dim=1, keepdim=True), 0
    ),
    "lstm": lambda x: LSTM(x.view(4, 5, 6))[0],
}
# Plain torch has no batching rule for these.
UNBATCHED = ("weight_norm", "lstm")
# The last bit of these depends on the kernel chosen, where nothing batches it.
ROUNDED = ("cumprod", "det")
ROWS = [
    *(("grad", case) for case in KERNELS if case not in ROUNDED),
    *(("grad_vmap", case) for case in KERNELS if case not in (*ROUNDED, *UNBATCHED)),
    *(("vmap_grad", case) for case in KERNELS if case not in UNBATCHED),
]


@pytest.mark.parametrize(("how", "case"), ROWS)
def test_the_kernels_are_those_of_plain_code(how, case):
    x = make(5, 4, 6, seed=30).float()

    def transform(f):
        return some(how)[how](lambda x: f(x.sin()).square().sum(), x)

    assert_rematerialized(transform, KERNELS[case], evaluations=2)
