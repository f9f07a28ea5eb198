"""Syntax of Python 3.12 and 3.13, as tests run with 3.11, too."""

import importlib.util
import sys
import textwrap

import pytest
import torch
from support.runs import leaf, replayed


pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="the syntax of Python 3.12"
)

PROGRAMS = {
    "a generic function": """
        def same[T](value: T) -> T:
            known: dict[T, int] = {}
            assert not known and T.__name__ == "T"
            return value

        def fn(x):
            return same(x.sin()).exp()
    """,
    "a generic function that is decorated": """
        def outer(scale):
            def fn[T: torch.Tensor](x: T) -> T:
                assert T.__name__ == "T"
                return (x * scale).sin().exp()
            return fn

        fn = outer(torch.tensor(2.0))
    """,
    "a generic class": """
        class Box[T]:
            def __init__(self, value: T):
                self.value, self.count = value, 0

            def get(self) -> T:
                self.count += 1
                return self.value

        box = Box[torch.Tensor](torch.tensor(3.0))

        def fn(x):
            return (x * box.get() * box.count).sin().exp()
    """,
    "a type alias": """
        type Pair[T] = tuple[T, T]

        def fn(x):
            pair: Pair[torch.Tensor] = (x.sin(), x.cos())
            assert Pair.__name__ == "Pair"
            return (pair[0] * pair[1]).exp()
    """,
    "a comprehension that is inlined": """
        def outer():
            scales = [1.0, 2.0]

            def fn(x):
                total = sum([(x * scale).sin() for scale in scales if scale])
                makers = [lambda: total * scale for scale in scales]
                return makers[-1]().exp()

            return fn

        fn = outer()
    """,
    "a comprehension in a class body": """
        scales = [1.0, 2.0]

        def fn(x):
            class Sum:
                parts = [scale * 2 for scale in scales]

            return (x * Sum.parts[1]).sin().exp()
    """,
    "names of its own frame": """
        def fn(x):
            y = x.sin()
            return locals()["y"].exp()
    """,
}
SINCE_3_13 = {
    "a type parameter with a default": """
        def same[T = float](value: T) -> T:
            return value

        def fn(x):
            return same(x.sin()).exp()
    """
}
if sys.version_info >= (3, 13):
    PROGRAMS |= SINCE_3_13


@pytest.fixture
def load(tmp_path):
    """Return a function that imports a file of a user's."""

    def load(text):
        path = tmp_path / "users_file.py"
        path.write_text(f"import torch\n{textwrap.dedent(text)}")
        spec = importlib.util.spec_from_file_location("users_file", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules["users_file"] = module
        spec.loader.exec_module(module)
        return module.fn

    yield load
    sys.modules.pop("users_file", None)


@pytest.mark.parametrize("name", PROGRAMS)
@replayed(each=True, exp=(1, 2))
def test_a_program_is_replayed(wrap, name, load):
    x, fn = leaf().detach().requires_grad_(), load(PROGRAMS[name])
    out = wrap(fn)(x)
    return out, torch.autograd.grad(out.sum(), x)


@pytest.mark.parametrize("name", PROGRAMS)
@replayed()
def test_a_program_is_replayed_under_a_transform(wrap, name, load):
    x = torch.randn(3)
    fn = wrap(load(PROGRAMS[name]))
    return torch.func.vmap(torch.func.grad(lambda x: fn(x).sum()))(x)


@replayed()
def test_a_generic_function_may_change_what_it_reads(wrap, load):
    text = """
        scale = 1.0

        def fn[T](x: T) -> T:
            global scale
            scale += 1.0
            return (x * scale).sin().exp()
    """
    x, fn = leaf(), load(text)
    out = wrap(fn)(x)
    gradient = torch.autograd.grad(out.sum(), x)
    return out, gradient, sys.modules["users_file"].scale
