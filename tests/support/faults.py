"""Faults that a change could bring in, and the tests that have to notice them.

A fault replaces a text in a file of remat by another one. The text occurs there once,
which `whole/test_repository.py` checks, so that the list follows the code. The list is
`faults.txt`: what goes wrong; below that the file; lines with `-`, and those with `+`
in their place; and what is run.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """A text to replace, and where a test fails then.

    Attributes:
        name: what goes wrong.
        file: below the repository's root.
        sound: the text.
        faulty: what stands in its place.
        tests: what is run.
    """

    name: str
    file: str
    sound: str
    faulty: str
    tests: tuple[str, ...]

    def plant(self, text: str) -> str:
        """Return the text of the file with the fault.

        Raises:
            ValueError: the sound text is not there once.
        """
        if text.count(self.sound) != 1:
            raise ValueError(f"{self.file}: {text.count(self.sound)} of {self.sound!r}")
        return text.replace(self.sound, self.faulty)


def fault_of(block: str) -> Fault:
    """Return the fault that some lines of the list say."""
    name, file, *change, tests = block.splitlines()
    sound, faulty = (
        "\n".join(line[2:] for line in change if line[0] == sign) for sign in "-+"
    )
    return Fault(name, file.strip(), sound, faulty, tuple(tests.split()))


BLOCKS = Path(__file__).with_suffix(".txt").read_text().strip("\n").split("\n\n")
FAULTS = [fault_of(block) for block in BLOCKS if not block.startswith("#")]
