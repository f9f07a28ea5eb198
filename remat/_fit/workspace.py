"""The bytes that operations hold while they run, and that fakes of results lack.

On the CPU, convolutions copy what they read into the layout of oneDNN, and copy what
they compute back; attention holds a tile of scores per thread.

Invariant: an operation that is not here is taken to hold nothing of its own. On an
accelerator that is so for convolutions too: what cuDNN takes is not known before.
Rejected: to run each operation once and measure. A step is planned for machines that
are not here, and for models that do not fit. To ask oneDNN: it tells of a convolution
only once it has memory for it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from remat._torch.tensors import is_fake


def held_inside(func: Any, args: Sequence[Any]) -> int:
    """Return the most bytes that an operation holds while it runs, results included."""
    rule = _rule_of(_KNOWN, func, args)
    return 0 if rule is None else rule(*args)


def hidden_in(func: Any, args: Sequence[Any]) -> tuple[int, int]:
    """Return which result has a larger storage than its fake, and by how many bytes."""
    rule = _rule_of(_HIDDEN, func, args)
    return (0, 0) if rule is None else rule(*args)


def _rule_of(rules: dict[Any, Any], func: Any, args: Sequence[Any]) -> Any:
    """Return the rule of an operation, if that is one on the CPU."""
    rule = rules.get(getattr(func, "overloadpacket", func))
    tensors = (arg for arg in args if isinstance(arg, Tensor))
    return None if rule and any(t.device.type != "cpu" for t in tensors) else rule


def copied_inside(func: Any, args: Sequence[Any]) -> int:
    """Return the bytes of arguments that an operation makes dense before it runs."""
    packet = getattr(func, "overloadpacket", func)
    if packet not in _MAKE_DENSE:
        return 0
    found = [a for a in args if isinstance(a, Tensor) and a.device.type == "cpu"]
    if packet in _BATCHED:  # one matrix at a time
        found = [a[:1] for a in found if a.ndim == 3]
    return sum(a.nbytes for a in found if _is_expanded(a))


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> int:
    rows, columns = _tile(q, k)
    tile = rows * (columns + 2 + v.shape[-1]) * torch.get_num_threads()
    return q.nbytes + 4 * (math.prod(q.shape[:3]) + tile)  # with sums of exponents


def _attention_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> int:
    rows, columns = _tile(q, k)
    tiles = 2 * rows * columns * torch.get_num_threads()
    return q.nbytes + k.nbytes + v.nbytes + g.nbytes + 4 * tiles


def _tile(q: Tensor, k: Tensor) -> tuple[int, int]:
    """Return the part of a matrix of scores that a thread holds."""
    length = q.shape[2]
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return rows, min(512, k.shape[2])


def _product(a: Tensor, b: Tensor, *_: Any) -> int:
    if a.element_size() != 2:
        return 0
    # oneDNN reads rows of the first, and columns of the second.
    copied = a.nbytes * (a.stride(-1) != 1) + b.nbytes * (b.stride(-1) == 1)
    return math.prod((*a.shape[:-1], b.shape[-1])) * a.element_size() + copied


def _norm_backward(g: Tensor, x: Tensor, w: Tensor | None, *_: Any) -> int:
    of_weight = 0 if w is None else 2 * w.nbytes
    return x.nbytes + of_weight + (0 if _is_expanded(g) else g.nbytes)


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


# --- Convolutions: copies that oneDNN was seen to make, of shapes alone ---


def _convolution(x: Tensor, w: Tensor, bias: Any, *rest: Any) -> int:
    stride, padding, _, transposed, _, _ = rest[:6]
    y = _shape_of_result(x, w, rest)
    results = math.prod(y) * x.element_size()
    if not _is_copied(x):
        return results + _REORDERED * w.nbytes
    if _is_small(x, w, rest):
        return results + _columns(x, w, y)
    if _is_product(w, stride, padding, transposed):
        return 0
    is_padded = bias is not None and y[1] % _BLOCK != 0
    copied = _read(x) + _weight(w) + is_padded * _bias(y) + _blocked(x, y)
    return max(copied, results + _blocked(x, y))


def _convolution_backward(
    g: Tensor, x: Tensor, w: Tensor, _bias_sizes: Any, *rest: Any
) -> int:
    stride, padding, _, transposed, _, groups, (of_x, of_w, of_bias) = rest[:7]
    x_bytes, b_bytes = x.nbytes if of_x else 0, _bias(g.shape) if of_bias else 0
    of_weight = (w.nbytes if of_w else 0) + b_bytes
    if not _is_copied(x):
        is_summed = of_w and w.shape[1] == 1 and max(w.shape[2:]) > 3
        of_weight += _SUMS * w.nbytes + b_bytes if is_summed else _REORDERED * w.nbytes
        return x_bytes + of_weight + _is_other(g) * g.nbytes
    if _is_small(x, w, rest):
        return x_bytes + of_weight + (_columns(x, w, g.shape) if of_w else 0)
    if _is_product(w, stride, padding, transposed):
        return 0
    copied, highest = _blocked(g, g.shape), 0
    if of_x:
        x_copied = _blocked(x, x.shape)
        # With strides, what no result reads is filled in afterwards.
        results = (1 if {*stride} == {1} else 2) * x_bytes
        highest = max(copied + _weight(w) + x_copied, x_copied + results)
    if not of_w:
        return highest
    if _is_by_columns(w, groups):
        return max(highest, x_bytes + of_weight + _by_columns(w, g))
    made = _weight(w) + b_bytes  # copied back when the others are freed
    return max(highest, x_bytes + made + max(copied + _read(x), of_weight))


# What oneDNN sums up apart, for large kernels of one channel: 256, and two copies.
_SUMS = 257
_REORDERED = 3  # copies of a weight for inputs that stay as they are


def _shape_of_result(x: Tensor, w: Tensor, rest: Sequence[Any]) -> tuple[int, ...]:
    stride, padding, dilation, transposed, output_padding, groups = rest[:6]
    every = zip(x.shape[2:], w.shape[2:], strict=True)
    sizes: list[int] = []
    for k, (n, size) in enumerate(every):
        s, p, d = (v[k] if len(v) > k else v[0] for v in (stride, padding, dilation))
        if transposed:
            more = output_padding[k] if len(output_padding) > k else output_padding[0]
            sizes.append((n - 1) * s - 2 * p + d * (size - 1) + more + 1)
        else:
            sizes.append((n + 2 * p - d * (size - 1) - 1) // s + 1)
    channels = w.shape[1] * groups if transposed else w.shape[0]
    return (x.shape[0], channels, *sizes)


def _is_copied(x: Tensor) -> bool:
    """Say whether the tensors of a convolution are brought into another layout."""
    return not (_is_last(x) and x.shape[1] > 1 and math.prod(x.shape[2:]) > 1)


def _is_other(g: Tensor) -> bool:
    """Say whether a gradient has another layout than an input with channels last."""
    return not (_is_last(g) or _is_expanded(g))  # as of a sum


def _is_last(x: Tensor) -> bool:
    last = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
    return x.ndim in (4, 5) and x.is_contiguous(memory_format=last)


def _is_small(x: Tensor, w: Tensor, rest: Sequence[Any]) -> bool:
    """Say whether torch computes a convolution itself, by a product of columns."""
    wide = w.ndim > 3 and min(w.shape[-2:]) > 3
    few = x.shape[0] == 1 and x.numel() <= 20480
    return few and rest[5] == 1 and not (wide or rest[3])


def _columns(x: Tensor, w: Tensor, y: Sequence[int]) -> int:
    if math.prod(w.shape[2:]) == 1:
        return 0
    return math.prod(w.shape[1:]) * math.prod(y[2:]) * x.element_size()


def _is_by_columns(w: Tensor, groups: int) -> bool:
    """Say whether oneDNN finds the gradient of a weight by a product of columns.

    It does for groups whose channels fill no block, but for small kernels of one
    channel, and for kernels that are larger than its own.
    """
    kernel = max(w.shape[2:])
    is_small = w.shape[1] == 1 and kernel <= 3
    return kernel > 14 or (groups > 1 and w.shape[1] % 8 != 0 and not is_small)


def _by_columns(w: Tensor, g: Tensor) -> int:
    """Return the bytes of the columns, and of sums of the gradient, of each thread."""
    columns = math.prod(w.shape[1:]) * math.prod(g.shape[2:]) * w.element_size()
    return torch.get_num_threads() * (4 * w.nbytes + columns) + 256


def _is_product(
    w: Tensor, stride: Sequence[int], padding: Sequence[int], transposed: bool
) -> bool:
    """Say whether a convolution is a product of matrices."""
    at_once = {*w.shape[2:], *stride} == {1} and not any(padding)
    return at_once and not transposed


# The channels of a block, in oneDNN's layout for wide vectors.
_BLOCK = 16


def _blocked(like: Tensor, shape: Sequence[int], block: int = _BLOCK) -> int:
    channels = -(-shape[1] // block) * block
    return shape[0] * channels * math.prod(shape[2:]) * like.element_size()


def _read(x: Tensor) -> int:
    """Return the bytes of the copy of an input; a few channels are read as they are."""
    few = x.shape[1]
    if few < 4:
        return 0
    return _blocked(x, x.shape, 8 if few <= 8 else _BLOCK)


def _bias(shape: Sequence[int]) -> int:
    return -(-shape[1] // _BLOCK) * _BLOCK * 4


def _weight(w: Tensor) -> int:
    out = -(-w.shape[0] // _BLOCK) * _BLOCK
    if w.shape[1] == 1:  # of groups
        return out * w[0].nbytes
    return out * _blocked(w, (1, *w.shape[1:]), 8 if w.shape[1] <= 8 else _BLOCK)


def _is_expanded(tensor: Tensor) -> bool:
    """Say whether elements of a tensor share memory, as those of `expand` do."""
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return any(n > 1 and stride == 0 for n, stride in dims)


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
    _aten.convolution: _convolution,
    _aten.convolution_backward: _convolution_backward,
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
