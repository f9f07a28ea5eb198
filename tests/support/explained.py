"""What the tests of `explain` share: functions, policies, and arguments for them."""

import torch
from support.zoo import make
from torch import nn
from torch.nn import functional as F  # noqa: N812

from remat import checkpoint_name, policies, remat


def blk(w, x):
    return torch.tanh(w @ checkpoint_name(torch.tanh(w @ x), "up"))


def mlp(w, v, x):
    h = F.layer_norm(x, x.shape[-1:])
    return x + checkpoint_name(F.gelu(h @ w), "up") @ v


def attention(q, k, v):
    out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return checkpoint_name(out.tanh(), "up")


def by_hand(q, k, v):
    scores = checkpoint_name((q @ k.mT).softmax(-1), "up")
    return (scores @ v).tanh()


def dropped(w, x):
    return F.dropout(checkpoint_name(w @ x, "up").exp(), 0.5).sin().sin()


def outputs(w, x):
    h = checkpoint_name(w @ x, "up").tanh()
    return {"sin": h.sin(), "rest": [h.exp() @ w, x.sum()], "index": h.argmax()}


def unused(w, x, bias):
    return w @ checkpoint_name(x.sin(), "up") + bias


def in_place(w, x):
    h = w @ x
    h.mul_(2)
    return checkpoint_name(h.tanh_().sin(), "up").exp()


class Convolutions(nn.Module):
    """Calls no modules: torch's FlopCounterMode would hook operations of its own in."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def run(self, images):
        h = F.conv2d(images, self.conv.weight, self.conv.bias)
        norm = self.norm
        h = F.batch_norm(
            *(h, norm.running_mean, norm.running_var, norm.weight, norm.bias),
            training=True,
        )
        return checkpoint_name(h, "up").relu().sin()


def example(*sizes):
    """Leaves that all require grad."""
    return tuple(
        make(*size, seed=i).float().requires_grad_() for i, size in enumerate(sizes)
    )


SQUARE = ((64, 64), (64, 64))

HEADS = ((2, 4, 16, 32),) * 3

CASES = {
    "blk": (blk, SQUARE),
    "mlp": (mlp, ((64, 256), (256, 64), (32, 64))),
    "attention": (attention, HEADS),
    "attention by hand": (by_hand, HEADS),
    "dropout": (dropped, SQUARE),
    "outputs": (outputs, SQUARE),
    "unused": (unused, (*SQUARE, (64,))),
    "in place": (in_place, SQUARE),
    "convolution": (None, ((2, 3, 32, 32),)),
}

POLICIES = {
    "none": None,
    "dots": policies.dots_saveable,
    "everything": policies.everything_saveable,
    "names": policies.save_only_these_names("up"),
    "larger": policies.save_larger_than(2**14),
}


def case_of(name):
    fn, sizes = CASES[name]
    torch.manual_seed(0)
    return (Convolutions().run if fn is None else fn), example(*sizes)


def two(w, x):
    one = remat(blk, prune=True)
    return one(w, one(w, x))


def nest(depth, *inner):
    """`remat` of `remat` of ...; the innermost have the policies given."""
    fn = blk
    for k in range(depth):
        fn = remat(fn, prune=True, policy=inner[k] if k < len(inner) else None)
    return fn


def whys(report):
    return [(op.name, op.fate, op.why) for op in report.ops if not op.is_view]
