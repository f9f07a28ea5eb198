"""Bytes, as a number or as a text.

Invariant: a text names its unit. Rejected: "8G", which means two things.
"""

import re


def as_bytes(budget: object) -> int:
    """Return a number of bytes.

    Args:
        budget: a number, or a text such as "8GB" (8e9) or "8 GiB" (8 * 2**30).

    Raises:
        TypeError: it is neither.
        ValueError: the text is no size, or the number is not positive.

    Example:
        >>> as_bytes("1.5 MB"), as_bytes("2KiB"), as_bytes(3e3)
        (1500000, 2048, 3000)
    """
    if isinstance(budget, bool) or not isinstance(budget, (int, float, str)):
        kind = type(budget).__name__
        raise TypeError(f"remat.fit: budget is a {kind}. {_FORM}")
    found = _parsed(budget) if isinstance(budget, str) else budget
    if not 0 < found < float("inf"):
        raise ValueError(f"remat.fit: the budget {budget!r} is not positive. {_FORM}")
    return int(found)


def _parsed(text: str) -> float:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"remat.fit: the budget {text!r} is no size. {_FORM}")
    number, prefix, binary = match.groups()
    power = " KMGT".index(prefix.upper()) if prefix else 0
    return float(number) * (1024 if binary else 1000) ** power


_SIZE = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*(?:([kKMGT])(i?))?B")
_FORM = 'Pass a number of bytes, or a text such as "8GB" or "8GiB".'
