"""Numbers of bytes, as people write them."""

import math

import pytest

from remat._base.sizes import bytes_in


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        (0, 0),
        (12, 12),
        (2.0, 2),
        ("0", 0),
        ("7", 7),
        ("7B", 7),
        ("8GB", 8 * 10**9),
        (" 8 gb ", 8 * 10**9),
        ("512 MiB", 512 * 2**20),
        ("1.5KiB", 1536),
        (".5 kb", 500),
        ("1.2345 KB", 1234),
        ("0.1 TiB", 2**40 // 10),
        ("3TB", 3 * 10**12),
        ("9007199254740993", 2**53 + 1),  # no float
    ],
)
def test_bytes_are_read(size, nbytes):
    found = bytes_in(size, "within")
    assert (found, type(found)) == (nbytes, int)


@pytest.mark.parametrize(
    "size",
    ["", "GB", "-1", "-1GB", "8 G", "8 GBs", "1e9", "1,000", "8 Gb/s", "٣GB", "a B"],
)
def test_another_text_is_refused_with_what_is_accepted(size):
    with pytest.raises(ValueError, match=r"remat: fit takes.*text '.*'.*'800 MB'"):
        bytes_in(size, "fit")


@pytest.mark.parametrize("size", [-1, -0.5, 0.5, math.nan, math.inf, -math.inf])
def test_another_number_is_refused(size):
    with pytest.raises(ValueError, match=r"remat: within takes a number of bytes; got"):
        bytes_in(size, "within")


@pytest.mark.parametrize("size", [None, True, b"8GB", [1], 1j])
def test_what_is_no_number_is_refused(size):
    with pytest.raises(
        TypeError, match=r"got .*, a (NoneType|bool|bytes|list|complex)"
    ):
        bytes_in(size, "within")
