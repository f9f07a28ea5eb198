"""`torch.func.vmap` with plain autograd around it."""

import pytest
import torch
from support.zoo import (
    BIG,
    BLOCKS,
    DEPTH,
    WS,
    XS,
    ZOO,
    W,
    X,
    assert_rematerialized,
    assert_zoo_rematerialized,
    block,
    blocks,
    counted,
    evaluations_at_base,
    leaves_of,
    make,
    matmul,
    plainly,
    scalar,
)
from torch.func import vmap

from remat import remat
from remat.testing import assert_same, count_ops, live_bytes, peak_bytes


def backward_through(batched, *tensors):
    """The values and the gradients of `batched` at copies of `tensors`."""
    tensors = leaves_of(*tensors)
    out = batched(*tensors)
    scalar(out).backward()
    return out, [t.grad for t in tensors]


# --- Which arguments, along which dimensions ---


BATCHES = {
    "both": ((0, 0), WS, XS),
    "inputs": ((None, 0), W, XS),
    "weights": ((0, None), WS, X),
}


@pytest.mark.parametrize("case", ZOO)
@pytest.mark.parametrize("batch", BATCHES)
def test_a_batch(batch, case):
    in_dims, w, x = BATCHES[batch]

    def transform(loss, *_):
        return backward_through(vmap(loss, in_dims), w, x)

    # The forward and one recomputation, of the whole batch.
    evaluations = evaluations_at_base(case)
    assert_zoo_rematerialized(transform, case, evaluations=evaluations)


@pytest.mark.parametrize("out_dim", [0, 1, -1])
@pytest.mark.parametrize("x_dim", [0, 1, 2, -1, None])
@pytest.mark.parametrize("w_dim", [0, 1, -1])
def test_any_dimensions(w_dim, x_dim, out_dim):
    def transform(f):
        batched = vmap(f, (w_dim, x_dim), out_dim)
        w = WS.movedim(0, w_dim)
        x = X if x_dim is None else XS.movedim(0, x_dim)
        return backward_through(batched, w, x)

    assert_rematerialized(transform, matmul, evaluations=2)


def test_dimensions_of_trees():
    def fn(tree, *, scale):
        h = tree["x"][0] @ tree["w"]
        return {"a": h.sin() * scale, "b": (h.sum(0), h[0, 0])}

    def transform(f):
        def batched(w, x):
            in_dims = ({"w": None, "x": [1, None]},)
            out_dims = {"a": 2, "b": (1, 0)}
            tree = {"w": w, "x": [x, "text"]}
            return vmap(f, in_dims, out_dims)(tree, scale=2.0)

        return backward_through(batched, W, XS.movedim(0, 1))

    assert_rematerialized(transform, fn, evaluations=2)


def test_outputs_that_are_not_batched():
    def fn(w, x):
        return w.sin(), x @ w, torch.ones(2, dtype=torch.double), w.exp()

    def transform(f):
        def batched(w, x):
            return vmap(f, (None, 0), (None, 0, None, 0))(w, x)

        return backward_through(batched, W, XS)

    assert_rematerialized(transform, fn, evaluations=2)


def test_outputs_that_are_not_tensors():
    def fn(w, x):
        return (x @ w).sin(), "text", None, 3

    def transform(f):
        def tensor_of(w, x):
            out, *rest = f(w, x)
            assert rest == ["text", None, 3]
            return out

        return backward_through(vmap(tensor_of, (None, 0)), W, XS)

    assert_rematerialized(transform, fn, evaluations=2)


def test_an_input_returned_as_it_is():
    def transform(f):
        return backward_through(vmap(f, (None, 0), (None, 0, 0)), W, XS)

    assert_rematerialized(transform, lambda w, x: (w, x, x @ w), evaluations=2)


def test_a_view_of_an_input():
    def transform(f):
        return backward_through(vmap(f, 1, 1), XS)

    assert_rematerialized(
        transform, lambda x: (x[0], x.T, x.sin().exp().diagonal()), evaluations=2
    )


def test_an_input_without_gradient():
    def transform(f):
        (w,) = leaves_of(W)
        index = torch.tensor([[0, 1], [1, 2], [3, 3]])
        out = vmap(f, (None, 0, 0))(w, index, XS)
        out.sum().backward()
        return out, w.grad

    assert_rematerialized(transform, lambda w, i, x: (x @ w)[i].sin(), evaluations=2)


def test_data_of_the_shape_of_a_batch_of_one():
    def transform(f):
        return backward_through(vmap(f, (None, 0)), W, X[None])

    assert_rematerialized(transform, matmul, evaluations=2)


# --- Nested, in chunks ---


@pytest.mark.parametrize("case", ZOO)
def test_nested(case):
    def transform(loss, *_):
        inner = vmap(loss, (0, None))
        return backward_through(vmap(inner, (None, 0), 1), WS, XS)

    evaluations = evaluations_at_base(case)
    assert_zoo_rematerialized(transform, case, evaluations=evaluations)


@pytest.mark.parametrize("inner_dim", [0, 1, 2])
@pytest.mark.parametrize("outer_dim", [0, 1, 3])
def test_nested_over_one_argument(outer_dim, inner_dim):
    def transform(f):
        xs = make(2, 3, 4, 4, seed=8).movedim(1, inner_dim + 1).movedim(0, outer_dim)
        inner = vmap(f, (None, inner_dim), 1)
        return backward_through(vmap(inner, (None, outer_dim), 2), W, xs)

    assert_rematerialized(transform, matmul, evaluations=2)


def test_three_deep():
    def transform(f):
        batched = f
        for _ in range(3):
            batched = vmap(batched, (None, 1), 1)
        xs = make(4, 2, 3, 2, 4, seed=8)
        return backward_through(batched, W, xs)

    assert_rematerialized(transform, matmul, evaluations=2)


@pytest.mark.parametrize(
    ("chunk", "chunks"), [(1, 5), (2, 3), (5, 1)], ids=["1", "2", "5"]
)
def test_chunks(chunk, chunks):
    def transform(f):
        batched = vmap(f, (None, 0), chunk_size=chunk)
        return backward_through(batched, W, make(5, 4, 4, seed=8))

    # Bitwise: the chunks are calls, and w is used once in each.
    assert_rematerialized(
        transform, lambda w, x: (x @ w).sin(), plain=chunks, evaluations=2 * chunks
    )


# --- Randomness ---


def noisy(w, x):
    return (torch.nn.functional.dropout(x @ w, 0.5) + torch.rand(4)).sin()


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_randomness_is_replayed(randomness):
    def transform(f):
        torch.manual_seed(3)
        batched = vmap(f, (None, 0), randomness=randomness)
        out, grads = backward_through(batched, W, XS)
        return out, grads, torch.rand(1)

    assert_rematerialized(transform, noisy, evaluations=2)


def test_the_same_randomness_is_the_same_for_all():
    fn, calls = counted(noisy)
    (w,) = leaves_of(W)
    x = X.expand(3, 4, 4)
    same = vmap(remat(fn), (None, 0), randomness="same")(w, x)
    different = vmap(remat(fn), (None, 0), randomness="different")(w, x)
    assert_same(same[0], same[1])
    assert not torch.equal(different[0], different[1])
    (same.sum() + different.sum()).backward()
    assert len(calls) == 4


def test_randomness_is_an_error_unless_asked_for():
    fn, calls = counted(noisy)
    w, x = leaves_of(W, XS)
    with pytest.raises(RuntimeError, match="called random operation while in randomn"):
        vmap(remat(fn), (None, 0))(w, x)
    assert len(calls) == 1
    vmap(remat(fn), (None, 0), randomness="same")(w, x).sum().backward()
    assert len(calls) == 3


def test_randomness_of_nested_vmaps():
    def transform(f):
        torch.manual_seed(3)
        inner = vmap(f, (0, None), randomness="different")
        batched = vmap(inner, (None, 0), randomness="same")
        return backward_through(batched, WS, XS)

    assert_rematerialized(transform, noisy, evaluations=2)


# --- Around and inside ---


@pytest.mark.parametrize("case", ZOO)
def test_vmap_inside(case):
    fn, call = ZOO[case]

    def batched(w, x):
        return vmap(lambda x: scalar(call(fn, w, x)))(x)

    assert_rematerialized(lambda f: backward_through(f, W, XS), batched, evaluations=2)


def test_captured_tensors_batched_or_not():
    def transform(f):
        def batched(w, x):
            def of_one(x, b):
                return f(lambda h: (h @ x) @ w + b, b)

            return vmap(of_one)(x, x[:, 0])

        return backward_through(batched, W, XS)

    assert_rematerialized(transform, lambda g, b: g(b).tanh(), evaluations=2)


def test_nothing_to_differentiate_calls_the_function_itself():
    fn, calls = counted(matmul)
    out = vmap(remat(fn), (None, 0))(W, XS)
    assert_same(out, vmap(matmul, (None, 0))(W, XS))
    (w,) = leaves_of(W)
    with torch.no_grad():
        assert_same(vmap(remat(fn), (None, 0))(w, XS), out)
    assert len(calls) == 2
    vmap(remat(fn), (None, 0))(w, XS).sum().backward()
    assert len(calls) == 4


# --- Costs ---


def test_ops_are_those_of_plain_and_one_more_forward():
    def ops_of(fn):
        with count_ops() as ops:
            backward_through(vmap(fn, (None, 0)), W, XS)
        return ops["tanh"], ops["tanh_backward"]

    assert ops_of(matmul) == (1, 1)
    assert ops_of(remat(matmul, prune=False)) == (2, 1)


def test_memory():
    (x,) = leaves_of(BIG.view(4, -1))
    one = BIG.nbytes

    def live(wrap):
        return live_bytes(lambda: vmap(wrap(block))(x))

    def peak(wrap):
        return peak_bytes(lambda: vmap(blocks(wrap))(x).sum().backward())

    assert live(plainly) == DEPTH * one
    assert live(remat) == one
    assert peak(plainly) >= BLOCKS * DEPTH * one
    assert peak(remat) <= (BLOCKS + DEPTH + 2) * one
