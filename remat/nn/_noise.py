"""Weight noise: a parametrization that adds noise to a weight, which nobody stores.

Invariant: the noisy weight is stored by no consumer, and a recompute of one draws the
noise that its first run drew.
Rejected: to count steps in the module. Each access of the weight would count, those of
a recompute too, so that a recompute would draw other noise than the first run.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from typing_extensions import override

from remat._scope.api import scope
from remat.random import Key, normal


M = TypeVar("M", bound=nn.Module)
KeySource = Key | Callable[[], Key]


def weight_noise(
    module: M, std: float, *, name: str = "weight", key: KeySource | None = None
) -> M:
    """Add Gaussian noise to a parameter while the module trains.

    In training mode, reading ``module.weight`` gives the parameter plus new noise. In
    evaluation mode, it gives the parameter. The noisy weight is made in a
    ``remat.scope``: what computes with it does not store it, and the backward adds the
    noise again. So noise costs no memory per layer.

    The standard deviation is absolute, not relative to the weight, as in RETURNN and in
    Graves 2011. Each access draws again. Under ``parametrize.cached()``, a weight that
    is read several times in a step has the same noise.

    Without a key, noise is from torch's global stream, or from the key of
    ``remat.random.bind`` where there is one. With a key, it is a function of the key
    alone. So pass a function that returns the key of the present step, such as
    ``lambda: random.fold_in(root, step)``, with a different root for each layer: a
    recompute in the same step draws the same noise, and the next step draws other
    noise. A key itself gives the same noise in each step.

    Args:
        module: has the parameter. It is changed in place.
        std: the standard deviation of the noise.
        name: of the parameter.
        key: a key of ``remat.random``, or a function that returns one; None to draw
            from the global stream.

    Returns:
        The module. Its ``state_dict`` has the keys that parametrizations have, such as
        ``parametrizations.weight.original``. ``parametrize.remove_parametrizations(
        module, "weight")`` in evaluation mode undoes this.

    Raises:
        ValueError: ``std`` is negative, or there is no such parameter.
        TypeError: ``key`` is not a key, and no function.

    Source: Graves 2011, "Practical Variational Inference for Neural Networks"; RETURNN.

    Example:
        >>> from remat import random
        >>> from remat.nn import weight_noise
        >>> root, step = random.key(0), 0
        >>> layer = nn.Linear(2, 2)
        >>> layer = weight_noise(layer, 0.1, key=lambda: random.fold_in(root, step))
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> for step in range(3):
        ...     loss = layer(torch.ones(4, 2)).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> layer.eval()(torch.ones(1, 2)).shape
        torch.Size([1, 2])
    """
    if std < 0:
        raise ValueError(f"remat: weight_noise got a negative std, {std}")
    if not isinstance(getattr(module, name, None), Tensor):
        kind = type(module).__name__
        raise ValueError(f"remat: weight_noise found no parameter {name!r} in {kind}")
    if not (key is None or isinstance(key, Key) or callable(key)):
        raise TypeError(_NO_KEY.format(key=key))
    # Not called to check it: that would draw a first time.
    parametrize.register_parametrization(module, name, _Noise(std, key), unsafe=True)
    return module


_NO_KEY = (
    "remat: weight_noise got key={key!r}. Pass a key of remat.random, a function that "
    "returns one, or None to draw from the global stream."
)


class _Noise(nn.Module):
    """Adds the noise to what it is given."""

    def __init__(self, std: float, key: KeySource | None) -> None:
        super().__init__()
        self.std, self.key = std, key

    @override
    def forward(self, weight: Tensor) -> Tensor:
        if not (self.training and self.std):
            return weight
        with scope():
            return weight + self.std * self._drawn(weight)

    def _drawn(self, weight: Tensor) -> Tensor:
        if self.key is None:
            return torch.randn_like(weight)
        key = self.key if isinstance(self.key, Key) else self.key()
        return normal(key.to(weight.device), weight.shape, weight.dtype)

    @override
    def extra_repr(self) -> str:
        return f"std={self.std}"
