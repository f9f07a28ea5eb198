"""The bytes that operations hold while they run, and that fakes of results lack.

On the CPU, convolutions copy what they read into the layout of oneDNN, and copy what
they compute back; attention holds a tile of scores per thread.

Invariant: an operation that is not here is taken to hold nothing of its own. On an
accelerator that is so for convolutions too: what cuDNN takes is not known before.
Rejected: to run each operation once and measure. A step is planned for machines that
are not here, and for models that do not fit.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from remat._fit.convolutions import convolution, convolution_backward, is_expanded
from remat._torch.tensors import is_fake


def held_inside(func: Any, args: Sequence[Any]) -> int:
    """Return the most bytes that an operation holds while it runs, results included."""
    packet = getattr(func, "overloadpacket", func)
    if any(isinstance(arg, Tensor) and arg.device.type != "cpu" for arg in args):
        return 0
    known = _KNOWN.get(packet)
    return 0 if known is None else known(*args)


def hidden_in(func: Any, args: Sequence[Any]) -> tuple[int, int]:
    """Return which result has a larger storage than its fake, and by how many bytes."""
    packet = getattr(func, "overloadpacket", func)
    known = _HIDDEN.get(packet)
    if known is None or any(
        isinstance(a, Tensor) and a.device.type != "cpu" for a in args
    ):
        return 0, 0
    return known(*args)


def copied_inside(func: Any, args: Sequence[Any]) -> int:
    """Return the bytes of arguments that an operation makes dense before it runs."""
    packet = getattr(func, "overloadpacket", func)
    if packet not in _MAKE_DENSE:
        return 0
    found = [a for a in args if isinstance(a, Tensor) and a.device.type == "cpu"]
    if packet in _BATCHED:  # one matrix at a time
        found = [a[:1] for a in found if a.ndim == 3]
    return sum(a.nbytes for a in found if is_expanded(a))


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> int:
    rows, columns = _tile(q, k)
    tile = rows * (columns + 2 + v.shape[-1]) * torch.get_num_threads()
    return q.nbytes + _log_sums(q) + 4 * tile


def _attention_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> int:
    rows, columns = _tile(q, k)
    tiles = 2 * rows * columns * torch.get_num_threads()
    return q.nbytes + k.nbytes + v.nbytes + g.nbytes + 4 * tiles


def _tile(q: Tensor, k: Tensor) -> tuple[int, int]:
    """Return the part of a matrix of scores that a thread holds."""
    length = q.shape[2]
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return rows, min(512, k.shape[2])


def _log_sums(q: Tensor) -> int:
    return 4 * math.prod(q.shape[:3])


def _product(a: Tensor, b: Tensor, *_: Any) -> int:
    if a.element_size() != 2:
        return 0
    # oneDNN reads rows of the first, and columns of the second.
    copied = a.nbytes * (a.stride(-1) != 1) + b.nbytes * (b.stride(-1) == 1)
    return math.prod((*a.shape[:-1], b.shape[-1])) * a.element_size() + copied


def _norm_backward(g: Tensor, x: Tensor, w: Tensor | None, *_: Any) -> int:
    of_weight = 0 if w is None else 2 * w.nbytes
    return x.nbytes + of_weight + (0 if is_expanded(g) else g.nbytes)


def _layer_norm_backward(g: Tensor, x: Tensor, *rest: Any) -> int:
    del g
    w = rest[3]
    of_weight = 0 if w is None else 2 * w.nbytes
    # Each thread adds up its own.
    return x.nbytes + of_weight * (1 + torch.get_num_threads())


def _group_norm_backward(g: Tensor, x: Tensor, *rest: Any) -> int:
    del g
    w, samples, channels = rest[2:5]
    of_weight = 0 if w is None else 2 * w.nbytes
    return x.nbytes + of_weight + 2 * samples * channels * x.element_size()


def _squares(x: Tensor, *_: Any) -> int:
    return 2 * x.nbytes


def _but_for_the_first(known: Callable[..., int]) -> Callable[..., int]:
    """Return the rule of an operation whose first argument does not count."""

    def rule(_: Any, *rest: Any) -> int:
        return known(*rest)

    return rule


def _unfolded(x: Tensor, *sizes: Sequence[int]) -> int:
    kernel, dilation, padding, stride = sizes
    each = zip(x.shape[-2:], kernel, dilation, padding, stride, strict=True)
    places = math.prod((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, d, p, s in each)
    per_place = math.prod(x.shape[:-2]) * math.prod(kernel)
    return x.nbytes + per_place * places * x.element_size()


def _cast(a: Any, b: Any, *_: Any) -> int:
    """Return what arguments of another type than the result are cast to."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.dtype == b.dtype:
        return 0
    kind = torch.result_type(a, b)
    casts = sum(t.numel() for t in (a, b) if t.ndim and t.dtype != kind)
    return (math.prod(torch.broadcast_shapes(a.shape, b.shape)) + casts) * kind.itemsize


def _sum(x: Tensor, *_: Any) -> int:
    """Return what a sum of integers or of a mask casts, to large integers."""
    is_cast = not x.dtype.is_floating_point and x.element_size() < _LONG
    return _LONG * (x.numel() + 1) if is_cast else 0


_LONG = 8  # bytes of an index


def _places(indices: Sequence[Any]) -> tuple[int, int]:
    """Return how many places masks have, and the bytes of an index per dimension."""
    count = held = 0
    for mask in indices:
        if mask is not None and mask.dtype in (torch.bool, torch.uint8):
            has_values = not (mask.is_meta or is_fake(mask))
            found = int(mask.count_nonzero()) if has_values else mask.numel()
            count, held = max(count, found), held + _LONG * found * mask.ndim
    return count, held


def _put(x: Tensor, indices: Sequence[Any], values: Tensor, adds: bool = False) -> int:
    is_filled = values.numel() == 1 and not adds  # as a mask fills
    held = 0 if is_filled else _places(indices)[1]
    return x.nbytes + held if held else 0


def _index(x: Tensor, indices: Sequence[Any]) -> int:
    places, held = _places(indices)
    if not held:
        return 0
    dims = x.shape[sum(1 if i is None else i.ndim for i in indices) :]
    between = [n for n, i in zip(x.shape, indices, strict=False) if i is None]
    return held + places * math.prod((*between, *dims)) * x.element_size()


def _bag_backward(g: Tensor, indices: Tensor, *rest: Any) -> int:
    largest, rows, mode = rest[3:5] + rest[6:7]
    made = rows * g.shape[1] * g.element_size()
    if mode == _MAX:
        return made + largest.nbytes + g.nbytes
    # Indices and places, sorted; for a sum the bag of each index, too.
    return made + (4 if mode == _SUM else 3) * _LONG * indices.numel()


_SUM, _MAX = 0, 2  # modes of a bag


def _ctc_backward(g: Tensor, x: Tensor, *rest: Any) -> int:
    del g
    alpha = rest[4]
    return x.nbytes + alpha.nbytes


def _margin_backward(g: Tensor, x: Tensor, *_: Any) -> int:
    del g
    return 3 * x.nbytes


# --- Results ---


def _folded(x: Tensor, shape: Sequence[int], kernel: Sequence[int], *_: Any) -> Any:
    """Return that the image lies in the memory of its patches, if that is larger."""
    size = x.numel() // x.shape[-1] // math.prod(kernel) * math.prod(shape)
    return 0, max(x.numel() - size, 0) * x.element_size()


def _loss(x: Tensor, target: Tensor, *rest: Any) -> tuple[int, int]:
    """Return what a loss leaves: its sum lies in the memory of all that is summed."""
    reduction = rest[0] if rest else _MEAN
    count = math.prod(torch.broadcast_shapes(x.shape, target.shape))
    return 0, max(count - 1, 0) * x.element_size() if reduction else 0


def _weighted_loss(x: Tensor, target: Tensor, *rest: Any) -> tuple[int, int]:
    return _loss(x, target, *rest[1:])


_MEAN = 1


def _rnn_layer(x: Tensor, *rest: Any) -> tuple[int, int]:
    """Return the workspace of an LSTM of oneDNN: gates and states, in whole pages."""
    time, samples, inputs = x.shape
    mode, hidden, is_trained = rest[8], rest[9], rest[14]
    if mode != _LSTM or not is_trained:
        return 3, 0
    states = 2 * (time + 1) * samples * 4
    gates = _pages(time * samples * _padded(4 * hidden) * 4)
    outputs = _pages(time * samples * _padded(hidden) * 4)
    padded, cells = _padded(max(inputs, hidden)), _pages(states * hidden)
    return 3, gates + outputs + 3 * _pages(states * padded) + 2 * cells


_LSTM = 2


def _rnn_inside(x: Tensor, hidden: int) -> int:
    time, samples, inputs = x.shape
    weights = 16 * hidden * (inputs + hidden + 1)
    gates = _pages(time * samples * _padded(4 * hidden) * 4)
    return weights + gates + 3 * 4096 + 64 * (inputs + hidden)


def _rnn_held(x: Tensor, *rest: Any) -> int:
    if rest[8] != _LSTM:
        return 0
    outputs = (x.shape[0] + 2) * x.shape[1] * rest[9] * 4
    return outputs + _rnn_layer(x, *rest)[1] + _rnn_inside(x, rest[9])


def _rnn_backward_held(x: Tensor, *rest: Any) -> int:
    if rest[13] != _LSTM:
        return 0
    states = x.shape[1] * rest[14] * 4
    made = x.nbytes + sum(w.nbytes for w in rest[:2]) + 8 * rest[14] * 4 + 2 * states
    return made + _rnn_inside(x, rest[14]) + (x.shape[0] + 2) * states


def _padded(count: int) -> int:
    """Return the length of a row of floats, so that rows share no cache sets."""
    padded = -(-count // 16) * 16
    return padded + 16 if padded % 256 == 0 else padded


def _pages(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


_aten = torch.ops.aten
_HIDDEN: dict[Any, Callable[..., tuple[int, int]]] = {
    _aten.mse_loss: _loss,
    _aten.smooth_l1_loss: _loss,
    _aten.soft_margin_loss: _loss,
    _aten.binary_cross_entropy: _weighted_loss,
    _aten.mkldnn_rnn_layer: _rnn_layer,
    _aten.col2im: _folded,
}
_BATCHED = {_aten.bmm, _aten.baddbmm}
_MAKE_DENSE = _BATCHED | {
    *(_aten.mm, _aten.addmm, _aten.convolution_backward),
    *(_aten.native_layer_norm_backward, _aten.native_group_norm_backward),
    *(_aten._softmax_backward_data, _aten._log_softmax_backward_data),
    *(_aten.embedding_dense_backward, _aten.max_pool2d_with_indices_backward),
    *(_aten.avg_pool2d_backward, _aten.upsample_bilinear2d_backward),
    *(_aten.upsample_nearest2d_backward, _aten.upsample_bicubic2d_backward),
    _aten.gelu_backward,
}
_KNOWN: dict[Any, Callable[..., int]] = {
    _aten.convolution: convolution,
    _aten.convolution_backward: convolution_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten.mm: _product,
    _aten.bmm: _product,
    _aten.addmm: _but_for_the_first(_product),
    _aten.baddbmm: _but_for_the_first(_product),
    _aten.native_batch_norm_backward: _norm_backward,
    _aten.native_group_norm_backward: _group_norm_backward,
    _aten.native_layer_norm_backward: _layer_norm_backward,
    _aten.mkldnn_rnn_layer: _rnn_held,
    _aten.mkldnn_rnn_layer_backward: _rnn_backward_held,
    _aten.im2col: _unfolded,
    **dict.fromkeys((_aten.add, _aten.sub, _aten.mul, _aten.div), _cast),
    _aten.sum: _sum,
    _aten.index: _index,
    _aten.index_put: _put,
    _aten._embedding_bag_backward: _bag_backward,
    _aten._ctc_loss_backward: _ctc_backward,
    _aten.soft_margin_loss_backward: _margin_backward,
}
