"""Numbers of bytes, as people write them.

Invariant: a number of bytes is an int. KB, MB and GB are powers of 1000; KiB, MiB and
GiB are powers of 1024. Rejected: to take GB for GiB, as some tools do. The two differ
by 7%, which can decide whether a step fits.
"""

import math
import re
from numbers import Real
from typing import Literal, NamedTuple, TypeAlias, cast


_UNITS = {
    "B": 1,
    **{f"{letter}B": 1000**k for k, letter in enumerate("KMGT", 1)},
    **{f"{letter}IB": 1024**k for k, letter in enumerate("KMGT", 1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*", re.ASCII)


def bytes_in(size: object, taker: str) -> int:
    """Return a number of bytes, given as a number or as a text such as "512 MiB".

    A fraction of a byte is left out. Errors name what takes it.

    Example:
        >>> bytes_in("8GB", "within"), bytes_in("1.5 KiB", "within"), bytes_in(7, "fit")
        (8000000000, 1536, 7)
    """
    what = f"the text {size!r}" if isinstance(size, str) else repr(size)
    if isinstance(size, bool) or not isinstance(size, Real | str):
        what = f"{what}, a {type(size).__name__}"
        raise TypeError(_REFUSED.format(taker=taker, what=what))
    number = _read(size) if isinstance(size, str) else size
    number = number if isinstance(number, int) else float(number)
    if not 0 <= number < math.inf or number != number // 1:
        raise ValueError(_REFUSED.format(taker=taker, what=what))
    return int(number)


Unit: TypeAlias = Literal["B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]


class Amount(NamedTuple):
    """A number of bytes, and the unit in which it was given."""

    nbytes: int
    unit: Unit = "B"


def amount_in(size: object, taker: str) -> Amount:
    """Return a number of bytes with its unit; that of a number is bytes.

    Example:
        >>> amount_in("8gb", "fit"), amount_in(7, "fit")
        (Amount(nbytes=8000000000, unit='GB'), Amount(nbytes=7, unit='B'))
    """
    nbytes, found = bytes_in(size, taker), _SIZE.fullmatch(str(size))
    letters = "" if found is None else found[2].upper()
    unit = letters.replace("IB", "iB")
    return Amount(nbytes, cast("Unit", "kB" if unit == "KB" else unit or "B"))


def in_unit(nbytes: int, unit: str) -> str:
    """Write a number of bytes in a unit, rounded up, with the bytes beside.

    Example:
        >>> in_unit(65_536, "KiB"), in_unit(65_537, "MB"), in_unit(65_536, "B")
        ('64 KiB (65,536 bytes)', '0.066 MB (65,537 bytes)', '65,536 bytes')
    """
    if unit == "B":
        return f"{nbytes:,} bytes"
    number = number_in(nbytes, unit).rstrip("0").rstrip(".")
    return f"{number} {unit} ({nbytes:,} bytes)"


def number_in(nbytes: int, unit: str) -> str:
    """Write how much of a unit a number of bytes is, rounded up to a thousandth."""
    thousandths = -(-nbytes * 1000 // _UNITS[unit.upper()])
    return f"{thousandths // 1000:,}.{thousandths % 1000:03}"


def _read(text: str) -> int:
    """Return how many bytes a text says; -1 if it says none."""
    found = _SIZE.fullmatch(text)
    unit = "" if found is None else found[2]
    is_bits = unit[-1:] == "b" and unit != unit.lower()
    if found is None or is_bits or (unit or "B").upper() not in _UNITS:
        return -1
    whole, _, fraction = found[1].partition(".")
    digits = int(whole or 0) * 10 ** len(fraction) + int(fraction or 0)
    return digits * _UNITS[(unit or "B").upper()] // 10 ** len(fraction)


_REFUSED = (
    "remat: {taker} takes a number of bytes; got {what}. Pass bytes as a whole number, "
    "at least 0, or as a text: '800 MB', '1.5GiB'. Units are B, KB, MB, GB and TB "
    "(powers of 1000), and KiB, MiB, GiB and TiB (powers of 1024); a small b after a "
    "capital letter is bits."
)
