"""Models whose steps are fitted into a budget, and the peak of a step as measured."""

import copy
import dataclasses
import functools

import pytest
import torch
from support.allocated import most_allocated
from torch import nn
from torch.nn import functional

import remat
from remat.testing import memory_timeline


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def mlps(count=6, width=32):
    blocks = nn.Sequential(*(Mlp(width) for _ in range(count)))
    return nn.Sequential(nn.Linear(8, width), blocks, nn.Linear(width, 4))


def staged(stages=3, count=4, width=32):
    """Blocks in modules that are called, so that these may be recomputed too."""
    parts = [nn.Sequential(*(Mlp(width) for _ in range(count))) for _ in range(stages)]
    return nn.Sequential(nn.Linear(8, width), *parts, nn.Linear(width, 4))


class Decoder(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        batch, time, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, time, 3, 2, width // 2)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(a.transpose(1, 2).reshape(batch, time, width)))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Lm(nn.Module):
    def __init__(self, count=3, width=32, words=200, dropout=0.1, tied=False):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Decoder(width, dropout) for _ in range(count))
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Basic(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.down = None
        if stride != 1:
            conv = nn.Conv2d(before, after, 1, stride, bias=False)
            self.down = nn.Sequential(conv, nn.BatchNorm2d(after))

    def forward(self, x):
        y = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        return functional.relu(
            y + (x if self.down is None else self.down(x)), inplace=True
        )


class ResNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        sizes = (width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)
        self.stages = nn.Sequential(
            *(nn.Sequential(Basic(i, o, s), Basic(o, o, 1)) for i, o, s in sizes)
        )
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x):
        x = self.stages(functional.relu(self.bn(self.stem(x))))
        return self.head(x.mean((2, 3)))


class Residual(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, before), nn.GroupNorm(4, after)
        self.conv1 = nn.Conv2d(before, after, 3, 1, 1)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1)
        same = before == after
        self.skip = nn.Identity() if same else nn.Conv2d(before, after, 1)

    def forward(self, x):
        y = self.conv1(functional.silu(self.norm1(x)))
        return self.skip(x) + self.conv2(functional.silu(self.norm2(y)))


class UNet(nn.Module):
    def __init__(self, w=16):
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, w, 3, 1, 1), nn.Conv2d(w, 3, 3, 1, 1)
        downs = (w, w), (w, 2 * w), (2 * w, 4 * w)
        self.downs = nn.ModuleList(Residual(i, o) for i, o in downs)
        self.middle = Residual(4 * w, 4 * w)
        ups = (8 * w, 2 * w), (4 * w, w), (2 * w, w)
        self.ups = nn.ModuleList(Residual(i, o) for i, o in ups)

    def forward(self, x):
        x, skipped = self.enter(x), []
        for down in self.downs:
            x = down(x)
            skipped.append(x)
            x = functional.avg_pool2d(x, 2)
        x = self.middle(x)
        for up in self.ups:
            x = functional.interpolate(x, scale_factor=2.0)
            x = up(torch.cat([x, skipped.pop()], 1))
        return self.leave(x)


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    return transformers.LlamaForCausalLM(config)


def square(out):
    return out.square().mean()


IDS = torch.arange(2 * 64).view(2, 64) % 100


def words(out):
    return functional.cross_entropy(out.flatten(0, -2), IDS.flatten())


# A model, its arguments, keyword arguments, and the loss.
CASES = {
    "mlps": (mlps, (torch.randn(256, 8),), {}, square),
    "lm": (Lm, (IDS,), {}, words),
    "tied lm": (lambda: Lm(tied=True), (IDS,), {}, words),
    "resnet": (ResNet, (torch.randn(4, 3, 32, 32),), {}, square),
    "unet": (UNet, (torch.randn(2, 3, 32, 32),), {}, square),
    "llama": (llama, (IDS,), {"labels": IDS}, None),
}


def bytes_before(model, *args):
    """Return the bytes of parameters, buffers and arguments."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [a for a in args if isinstance(a, torch.Tensor)]
    found = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in found.values())


def step(model, args, kwargs, loss):
    """Run a step, with the result alive until the end."""
    out = model(*args, **kwargs)
    value = out.loss if loss is None else loss(out)
    value.backward()


def measured_peak(model, args, kwargs, loss):
    """Return the most bytes alive in the first two steps, as the profiler sees them."""
    model, found = copy.deepcopy(model), []
    for _ in range(2):
        timeline = memory_timeline(step, model, args, kwargs, loss)
        model.zero_grad()
        found.append(timeline.peak)
    return bytes_before(model, *args, *kwargs.values()) + max(found)


def assert_predicted(predicted, measured):
    """Assert that a predicted peak is at most 5% above and 2% below the measured."""
    assert 0.98 * measured <= predicted <= 1.05 * measured, (predicted, measured)


# --- Steps of others ---


def planned(model, *args, share=0.35, **options):
    """Return a plan between the least budget and plain code's peak."""
    most = remat.fit(model, *args, budget="1GB", **options).peak
    with pytest.raises(remat.BudgetError, match=r"least budget") as raised:
        remat.fit(model, *args, budget=1, **options)
    low = raised.value.least
    return remat.fit(model, *args, budget=int(low + share * (most - low)), **options)


def peak_and_gradients(model, *args, loss=lambda out: out, **kwargs):
    """Return the peak of a step, with what was there before, and the gradients."""

    def run():
        out = model(*args, **kwargs)
        loss(out).backward()

    before = bytes_before(model, *args, *kwargs.values())
    before += sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    most, _ = most_allocated(run)
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return before + most, found


# --- Plans ---


X = torch.randn(256, 8)


def least(model, *args, **options):
    """Return the least budget that there is a plan for."""
    with pytest.raises(remat.BudgetError, match=r"The least budget") as raised:
        remat.fit(model, *args, budget=1, **options)
    return raised.value.least


@functools.cache
def refused(over):
    """Return the error for `mlps()` in a kilobyte."""
    with pytest.raises(remat.BudgetError, match=r"The least budget") as raised:
        remat.fit(mlps(), X, loss=square, budget=1000, over=over)
    return raised.value


@functools.cache
def _tight(over):
    return remat.fit(mlps(), X, loss=square, budget=refused(over).least, over=over)


def tight(over="step"):
    """Return the plan of the least budget for `mlps()`, which was not applied yet."""
    return dataclasses.replace(_tight(over), is_applied=False)


def applied_mlps(over="step"):
    """Return a plain model, a copy that follows the tight plan, and the plan."""
    model, plan = mlps(), tight(over)
    return model, plan.apply(copy.deepcopy(model)), plan


def gradients(model, run, seed=0):
    """Run a backward from a seed, and return the gradients of a model."""
    torch.manual_seed(seed)
    model.zero_grad()
    run()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]
