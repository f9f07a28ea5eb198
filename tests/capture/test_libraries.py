"""Libraries are recognized wherever they are installed; all else is the user's.

What is walked is counted: the functions of a package whose code a call looked into.
"""

import importlib
import json
import os
import site
import sys

import pytest
import torch
from support.runs import assert_replayed, configurations, leaf
from torch import nn

from remat import MutationError, remat
from remat._base import code, installed
from remat.testing import assert_same, count_ops


SOURCE = """
from torch import nn

SCALE = [2.0]


def scaled(x):
    return x * SCALE[0]


def block(x):
    return scaled(x.exp()).exp()


class Layer(nn.Module):
    def forward(self, x):
        return block(x)
"""
NAMES = (f"far_package_{n}" for n in range(1000))  # one for each test: Python caches


class Machine:
    """Folders with packages.

    Attributes:
        name: that of the package.
        root: the folder that all others are in.
    """

    def __init__(self, root):
        self.name, self.root = next(NAMES), root

    def write(self, *folder, name=None):
        """Write the package into a folder, and return the folder."""
        place = self.root.joinpath(*folder)
        (place / (name or self.name)).mkdir(parents=True)
        (place / (name or self.name) / "__init__.py").write_text(SOURCE)
        return place

    def note(self, place, **files):
        """Write what an installer notes of the package into a folder of packages."""
        notes = place / f"{self.name}-1.0.dist-info"
        notes.mkdir(parents=True)
        (notes / "METADATA").write_text(f"Name: {self.name}\nVersion: 1.0\n")
        for name, text in files.items():
            (notes / name.replace("_json", ".json")).write_text(text)

    def note_editable(self, place, project, *, editable=True):
        origin = {"url": project.as_uri(), "dir_info": {"editable": editable}}
        self.note(place, RECORD="", direct_url_json=json.dumps(origin))

    def record(self):
        return (
            f"{self.name}/__init__.py,sha256=x,1\n{self.name}-1.0.dist-info/RECORD,,\n"
        )


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    made = Machine(tmp_path)
    yield made
    sys.modules.pop(made.name, None)
    importlib.invalidate_caches()


def walked(package):
    """Return how many functions of a package calls have looked into."""
    files = [known.code.co_filename for known in code._KNOWN.values()]
    return sum(file == package.__file__ for file in files)


# --- Where libraries are ---


def in_a_second_site_directory(machine):
    sys.path.append(str(machine.write("lib", "site-packages")))


def in_the_packages_of_a_distribution(machine):
    sys.path.append(str(machine.write("usr", "lib", "python3", "dist-packages")))


def in_a_folder_that_a_pth_file_names(machine):
    other = machine.write("other", "site-packages")
    first = machine.root / "first" / "site-packages"
    first.mkdir(parents=True)
    (first / "other.pth").write_text(f"{other}\n")
    site.addsitedir(str(first))


def in_the_folder_of_a_target(machine):
    folder = machine.write("deps")
    machine.note(folder, RECORD=machine.record())
    sys.path.append(str(folder))


def in_a_folder_that_left_the_path(machine):
    """As where a program puts a folder on `sys.path` for one import."""
    sys.path.append(str(machine.write("site-packages")))
    importlib.import_module(machine.name)
    sys.path.pop()


def in_the_environment_of_an_editable_project(machine):
    place = machine.write("project", ".venv", "lib", "site-packages")
    machine.note_editable(place, machine.root / "project")
    sys.path.append(str(place))


def from_a_folder_that_was_copied(machine):
    """Of `pip install ./project`, which notes the project as well."""
    place = machine.write("lib", "site-packages")
    machine.note_editable(place, place, editable=False)
    sys.path.append(str(place))


LIBRARIES = [
    in_a_second_site_directory,
    in_the_packages_of_a_distribution,
    in_a_folder_that_a_pth_file_names,
    in_the_folder_of_a_target,
    in_a_folder_that_left_the_path,
    in_the_environment_of_an_editable_project,
    from_a_folder_that_was_copied,
]


@pytest.mark.parametrize("install", LIBRARIES)
def test_a_library_is_not_walked(machine, install):
    install(machine)
    package = importlib.import_module(machine.name)
    layer = package.Layer()
    with count_ops() as ops:
        remat(lambda x: layer(package.block(x)))(leaf(3)).sum().backward()
    assert ops["exp"] == 8  # the call and its recompute
    assert walked(package) == 0


# --- Where the user's own code is ---


def in_a_folder_of_the_path(machine):
    sys.path.append(str(machine.write("project")))


def beside_what_is_installed(machine):
    """As where packages are installed into the folder of a program."""
    folder = machine.write("program")
    machine.write("program", name="other_package")
    record = machine.record().replace(f"{machine.name}/", "other_package/")
    machine.note(folder, RECORD=record)
    sys.path.append(str(folder))


def beside_what_a_build_left(machine):
    folder = machine.write("project")
    machine.note(folder)  # no RECORD: nothing was installed
    sys.path.append(str(folder))


def editable(machine):
    project = machine.write("project", "src")
    place = machine.root / "lib" / "site-packages"
    machine.note_editable(place, project.parent)
    (place / "project.pth").write_text(f"{project}\n")
    site.addsitedir(str(place))


def editable_and_linked(machine):
    project = machine.write("project")
    place = machine.root / "lib" / "site-packages"
    machine.note_editable(place, project)
    os.symlink(project / machine.name, place / machine.name)
    sys.path.append(str(place))


def editable_inside_of_the_site_directory(machine):
    place = machine.root / "lib" / "site-packages"
    project = machine.write("lib", "site-packages", "checkouts", "project")
    machine.note_editable(place, project)
    sys.path += [str(place), str(project)]


USERS = [
    in_a_folder_of_the_path,
    beside_what_is_installed,
    beside_what_a_build_left,
    editable,
    editable_and_linked,
    editable_inside_of_the_site_directory,
]


@pytest.mark.parametrize("install", USERS)
def test_code_of_the_user_is_walked_and_its_globals_are_put_back(machine, install):
    install(machine)
    package = importlib.import_module(machine.name)
    layer, x = package.Layer(), leaf(3)
    y = x.detach().clone().requires_grad_()
    layer(y).sum().backward()
    with count_ops() as ops:
        out = remat(lambda x: layer(x))(x)
        package.SCALE[0] = 5.0
        out.sum().backward()
    assert ops["exp"] == 4
    assert torch.equal(x.grad, y.grad)
    assert walked(package) == 3  # forward, block, scaled


# --- When it is found out ---


def test_a_warm_call_does_not_ask_where_a_file_is(machine, monkeypatch):
    in_the_folder_of_a_target(machine)
    package = importlib.import_module(machine.name)
    asked, find = [], installed._is_installed
    monkeypatch.setattr(
        installed, "_is_installed", lambda file: asked.append(file) or find(file)
    )
    layer = package.Layer()
    fn = remat(lambda x: layer(package.block(x)))
    with count_ops() as ops:
        fn(leaf(3)).sum().backward()
        assert asked.count(package.__file__) == 1
        fn(leaf(3)).sum().backward()
    assert len(asked) == len({*asked})
    assert ops["exp"] == 16


def test_the_notes_of_a_folder_are_read_once(machine, monkeypatch):
    in_the_folder_of_a_target(machine)
    read, find = [], installed._distributions
    monkeypatch.setattr(
        installed, "_distributions", lambda folder: read.append(folder) or find(folder)
    )
    deps = str(machine.root / "deps")
    for name in (machine.name, "mine", "others"):
        file = os.path.join(deps, name, "__init__.py")
        assert installed.is_installed(file) == (name == machine.name)
    assert read.count(os.path.join(deps, "")) <= 2  # what is there, what is editable


def test_an_answer_changes_with_the_path(machine):
    folder = machine.write("deps")
    machine.note(folder, RECORD=machine.record())
    scope = {"__file__": str(folder / machine.name / "__init__.py")}
    assert not code.is_library(scope)
    sys.path.append(str(folder))
    assert code.is_library(scope)
    sys.path.remove(str(folder))
    assert not code.is_library(scope)


def test_a_package_that_is_installed_later_is_recognized(machine):
    folder = machine.write("deps")
    sys.path.append(str(folder))
    assert not installed.is_installed(str(folder / "mine.py"))
    machine.note(folder, RECORD=machine.record())
    os.utime(folder, ns=(1, 1))  # where a clock is too coarse to show the change
    assert installed.is_installed(str(folder / machine.name / "__init__.py"))


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(installed, "_SIZE", 10)
    monkeypatch.setattr(installed, "_answers", installed._Answers())
    for n in range(30):
        assert not installed.is_installed(f"/mine/{n}.py")
    assert len(installed._answers.of) == 10


# --- What is not a folder of packages ---


@pytest.mark.parametrize(
    "file", ["/home/me/my-site-packages/a.py", "/home/me/site-packages.py", "a.py", ""]
)
def test_a_name_that_is_only_similar_is_no_site_directory(file):
    assert not installed.is_installed(file)


def test_an_origin_that_is_not_as_specified_is_no_editable_install(machine):
    place = machine.write("lib", "site-packages")
    machine.note(place, direct_url_json='["no", "object"]')
    sys.path.append(str(place))
    assert installed.is_installed(str(place / machine.name / "__init__.py"))


def test_python_torch_and_remat_are_no_code_of_the_user():
    for module in (json, os, torch, torch.nn, installed, pytest):
        assert code.is_library(vars(module)), module
    assert not code.is_library(globals())


# --- Embeddings that scale their weight in each forward ------------------------------

# Other layers of torch are in the theme `built` of `support.adversarial`.


def weight_of(rows=50):
    """Rows that are longer than one, and stay so now and then by rounding."""
    return (3 * torch.randn(rows, 4)).requires_grad_()


def embedded(x, weight, indices):
    y = nn.functional.embedding(indices, weight, max_norm=1.0)
    return (y * x).sin().exp()


@configurations
def test_an_embedding_that_a_call_within_scales_is_scaled_once(ours):
    indices = torch.randint(0, 49, (20,))

    def program(wrap):
        weight, x = weight_of(), leaf(4)
        inner = wrap(lambda x: embedded(x, weight, indices))
        y = wrap(lambda x: inner(x.cos()).tanh())(x)
        scaled = weight.detach().clone()
        found = torch.autograd.grad(y.sum(), (x, weight))
        assert_same(weight.detach(), scaled)  # a recompute leaves no trace
        return found, scaled

    assert_replayed(program, wrap=ours, tanh=(1, 2))


def test_other_changes_of_such_a_weight_are_refused():
    def fn(x, weight, indices):
        y = embedded(x, weight, indices)
        with torch.no_grad():
            weight.mul_(0.5)
        return y

    args = leaf(4), weight_of(), torch.tensor([0, 1])
    with pytest.raises(MutationError, match="`weight` was changed in place inside"):
        remat(fn)(*args)
