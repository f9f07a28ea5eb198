"""Rules for torch's dropout and attention inside `bind`.

As in `_rerouted`, a rule is called with `draw` and the arguments of the torch function
that it replaces.

Invariant: if nothing is dropped, the result is what torch's own formula gives.
Rejected: passing a dropout mask to torch's attention kernel. It takes one, but it warns
in every process that this is meant for tests.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from remat.random._draw import shape_like
from remat.random._dropout import dropout
from remat.random._key import Key
from remat.random._rerouted import Draw, Rule, laid_out
from remat.random._samplers import bernoulli, check_probability


# -- Dropout --------------------------------------------------------------------------


def _drops(p: float, train: bool | None, x: Tensor) -> bool:
    check_probability(p)
    return train is not False and p > 0 and x.numel() > 0


def _features(x: Tensor) -> tuple[int, ...]:
    if x.dim() < 2:
        raise ValueError(
            "remat: feature dropout needs at least 2 dimensions, batch and features; "
            f"got {x.dim()}."
        )
    return shape_like(x, (*x.shape[:2], *(1 for _ in x.shape[2:])))


def _zeroed(key: Key, x: Tensor, p: float, shape: tuple[int, ...]) -> Tensor:
    if shape == x.shape:
        return dropout(key, x, p)
    scale = 1 / (1 - p) if p < 1 else 1.0
    return torch.where(_mask(key, x, p, shape), 0.0, x * scale)


def _mask(key: Key, x: Tensor, p: float, shape: tuple[int, ...]) -> Tensor:
    # A mask of the full shape gives the result its strides.
    mask = bernoulli(key, p, shape)
    return laid_out(mask, x) if shape == x.shape else mask


# Minus the limit of selu: Klambauer et al., "Self-Normalizing Neural Networks", 2017.
_ALPHA = 1.7580993408473766


def _saturated(key: Key, x: Tensor, p: float, shape: tuple[int, ...]) -> Tensor:
    """Drop to the limit of selu. Then scale and shift to keep mean and variance."""
    if p == 1:
        return x * 0
    scale = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
    dropped = torch.where(_mask(key, x, p, shape), -_ALPHA, x)
    return dropped * scale + _ALPHA * scale * p


def _dropout(plain: Any, drop: Any, shape: Any) -> Rule:
    is_in_place = plain.__name__.endswith("_")

    def rule(draw: Draw, input: Tensor, p: float, train: bool) -> Tensor:
        if not _drops(p, train, input):
            return plain(input, p, train)
        out = drop(draw().to(input.device), input, p, shape(input))
        out = laid_out(out, input)
        return input.copy_(out) if is_in_place else out

    return rule


def _named(plain: Any, in_place: Any, *, is_on: bool) -> Rule:
    """Return the rule of a dropout of `torch.nn.functional`, of the same kernels."""

    def rule(
        draw: Draw,
        input: Tensor,
        p: float = 0.5,
        training: bool = is_on,
        inplace: bool = False,
    ) -> Tensor:
        return LAYERS[in_place if inplace else plain](draw, input, p, training)

    return rule


# -- Attention ------------------------------------------------------------------------


_torch_attention = functional.scaled_dot_product_attention


def _attention(
    draw: Draw,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    check_probability(dropout_p)
    if not dropout_p:
        how: Any = {"scale": scale, "enable_gqa": enable_gqa}
        args = query, key, value, attn_mask, dropout_p, is_causal
        return _torch_attention(*args, **how)
    if is_causal:
        attn_mask = _causal(attn_mask, query, key)
    query, key, value, attn_mask = _autocast(query, key, value, attn_mask)
    # In half precision only the result is rounded to it, as in torch.
    inside = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        q, k, v = (t.to(inside) for t in (query, key, value))
        if enable_gqa:
            k, v = _repeated(k, q), _repeated(v, q)
        weights = _weights(q, k, attn_mask, scale)
        kept = dropout(draw().to(q.device), weights, dropout_p)
        return (kept @ v).to(query.dtype)


def _autocast(*tensors: Any) -> Any:
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return [
        t if t is None or t.dtype in (torch.bool, torch.float64) else t.to(dtype)
        for t in tensors
    ]


def _causal(attn_mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    if attn_mask is not None:
        raise ValueError(
            "remat: scaled_dot_product_attention takes either attn_mask or "
            "is_causal=True, got both. Pass one of them."
        )
    size = query.shape[-2], key.shape[-2]
    return torch.ones(size, dtype=torch.bool, device=query.device).tril()


def _repeated(heads: Tensor, query: Tensor) -> Tensor:
    return heads.repeat_interleave(query.shape[-3] // heads.shape[-3], -3)


def _weights(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, scale: float | None
) -> Tensor:
    # Each side takes the root of the scale, as in torch's formula, against overflow.
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    half = math.sqrt(abs(scale))
    scores = (query * math.copysign(half, scale)) @ (key * half).transpose(-2, -1)
    if attn_mask is None:
        return scores.softmax(-1)
    if attn_mask.dtype is torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    else:
        scores = scores + attn_mask
    # A query with every key masked gets zeros, as in torch. So no gradient is NaN.
    blind = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)


_DROPOUTS = {
    "dropout": (_zeroed, shape_like),
    "alpha_dropout": (_saturated, shape_like),
    "feature_dropout": (_zeroed, _features),
    "feature_alpha_dropout": (_saturated, _features),
}
LAYERS: dict[Any, Rule] = {
    _torch_attention: _attention,
}
for _name, _how in _DROPOUTS.items():
    _both = getattr(torch, _name), getattr(torch, _name + "_")
    LAYERS |= {plain: _dropout(plain, *_how) for plain in _both}
    if hasattr(functional, _name):
        LAYERS[getattr(functional, _name)] = _named(*_both, is_on=_name == "dropout")
