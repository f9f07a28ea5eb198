"""What messages call a function.

Invariant: a label is a string in every message, and knows the name in it.
Rejected: to read the name back from the text.
"""

from typing_extensions import override


class Label(str):
    """Text that names a function, whose `name` it knows."""

    __slots__ = ("name",)
    name: str

    @override
    def __new__(cls, text: str, name: str) -> "Label":  # pyrefly: ignore[bad-override]
        label = super().__new__(cls, text)
        label.name = name
        return label

    @override
    def __getnewargs__(self) -> tuple[str, str]:  # pyrefly: ignore[bad-override]
        return str(self), self.name


def label_of(name: str, where: str = "", was: str = "rematerialized") -> Label:
    """Return what to call a function, and where what was done to it."""
    text = f"`{name}` ({was} at {where})" if where else f"`{name}`"
    return Label(text, name)


def name_in(label: str) -> str:
    """Return the name of the function that a label is of."""
    return label.name if isinstance(label, Label) else label
