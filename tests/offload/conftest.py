"""The folder of the files, and their sizes."""

import os

import pytest

from remat._offload import offload as _offload


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of its own for the files, which has to be empty in the end."""
    monkeypatch.setenv("REMAT_OFFLOAD_DIR", str(tmp_path))
    yield tmp_path
    assert os.listdir(tmp_path) == []


@pytest.fixture
def sizes(monkeypatch):
    """The size of each file at the time it is mapped."""
    found, mapped = [], _offload._mapped

    def noting(file, nbytes):
        found.append(os.fstat(file.fileno()).st_size)
        return mapped(file, nbytes)

    monkeypatch.setattr(_offload, "_mapped", noting)
    return found
