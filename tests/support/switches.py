"""Models with switches of their own, as those of transformers and diffusers have them.

`Newer` is transformers from 5.23 on, `Older` before, `Stacked` diffusers. Each has
three blocks of two products and a `tanh`.
"""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)

    def run(self, x):
        return x + self.down(self.up(x).tanh())

    def forward(self, x):
        return self.run(x)


class Layer(Block):
    """A block that asks itself, by an attribute of its class."""

    gradient_checkpointing = False

    def forward(self, x):
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(partial(self.run), x)
        return self.run(x)


class Older(nn.Module):
    kind = Layer

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([self.kind() for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs=None):
        options = gradient_checkpointing_kwargs or {"use_reentrant": False}
        self._set_gradient_checkpointing(True, partial(checkpoint, **options))

    def gradient_checkpointing_disable(self):
        self._set_gradient_checkpointing(False)

    def _set_gradient_checkpointing(
        self, enable=True, gradient_checkpointing_func=checkpoint
    ):
        for module in self.modules():
            if hasattr(module, "gradient_checkpointing"):
                module._gradient_checkpointing_func = gradient_checkpointing_func
                module.gradient_checkpointing = enable


class Newer(Older):
    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs=None, every_n_layers=1, offload=False
    ):
        def offloading(function, *args, **kwargs):
            with torch.autograd.graph.save_on_cpu():
                return checkpoint(function, *args, **kwargs)

        options = activation_checkpointing_kwargs or {"use_reentrant": False}
        function = partial(offloading if offload else checkpoint, **options)
        self._set_gradient_checkpointing(True, function, every_n_layers)

    def activation_checkpointing_disable(self):
        self._set_gradient_checkpointing(False)

    def _set_gradient_checkpointing(
        self, enable=True, gradient_checkpointing_func=checkpoint, every_n_layers=1
    ):
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func)
        for k, layer in enumerate(self.layers):
            layer.gradient_checkpointing = enable and k % every_n_layers == 0


class Stacked(Older):
    """A model that asks itself, and calls its blocks."""

    kind = Block

    def __init__(self):
        super().__init__()
        self.gradient_checkpointing = False
        self._gradient_checkpointing_func = None

    gradient_checkpointing_enable = gradient_checkpointing_disable = property()

    def enable_gradient_checkpointing(self, gradient_checkpointing_func=None):
        function = gradient_checkpointing_func or partial(
            checkpoint, use_reentrant=False
        )
        self._set_gradient_checkpointing(True, function)

    def disable_gradient_checkpointing(self):
        self._set_gradient_checkpointing(False)

    def forward(self, x):
        for layer in self.layers:
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                x = self._gradient_checkpointing_func(layer, x)
            else:
                x = layer(x)
        return x


def switch_on(model):
    """Switch on what the library has, by its newest name."""
    for name in "activation_checkpointing_enable", "gradient_checkpointing_enable":
        if hasattr(model, name):
            return getattr(model, name)()
    return model.enable_gradient_checkpointing()


def switch_off(model):
    """Switch it off."""
    for name in "activation_checkpointing_disable", "gradient_checkpointing_disable":
        if hasattr(model, name):
            return getattr(model, name)()
    return model.disable_gradient_checkpointing()


MODELS = {"newer": Newer, "older": Older, "stacked": Stacked}
