"""Runs all programs in all configurations, and prints what became of them."""

import argparse
import sys
from collections import Counter

from support.adversarial.configurations import CONFIGURATIONS
from support.adversarial.contexts import CONTEXTS
from support.adversarial.outcomes import Outcome
from support.adversarial.serving import Server
from support.adversarial.themes import load


KINDS = ("right", "refused", "raised", "wrong", "crashed", "none")
Outcomes = dict[tuple[str, str], Outcome]


def main() -> None:
    """Run the programs whose names contain a word, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "word", nargs="?", default="", help="run programs with this word"
    )
    parser.add_argument("--only", choices=[*CONFIGURATIONS, *CONTEXTS], action="append")
    parser.add_argument(
        "--known", action="store_true", help="print lines for known.txt"
    )
    parser.add_argument("--all", action="store_true", help="list what torch fails, too")
    options = parser.parse_args()
    names = [name for name in load() if options.word in name]
    configurations = options.only or [*CONFIGURATIONS, *CONTEXTS]
    with Server() as server:
        outcomes = {
            (n, c): server.outcome_of(n, c) for n in names for c in configurations
        }
    if options.known:
        _print_known(outcomes)
        return
    _print_failures(outcomes, all_=options.all)
    _print_counts(outcomes, configurations)


def is_worse(outcomes: Outcomes, name: str, configuration: str) -> bool:
    """Say whether a configuration fails what torch's checkpoint gets right."""
    kind = outcomes[name, configuration].kind
    if kind in ("right", "none"):
        return False
    if configuration in CONTEXTS:  # where torch's checkpoint refuses everything
        return kind != "refused"
    torchs = outcomes.get((name, "torch"))
    if torchs is None or torchs.kind == "right":
        return True
    return outcomes[name, configuration].kind != "refused"


def _print_failures(outcomes: Outcomes, *, all_: bool) -> None:
    for (name, configuration), outcome in outcomes.items():
        worse = configuration != "torch" and is_worse(outcomes, name, configuration)
        if worse or (all_ and outcome.kind != "right"):
            _write(f"{configuration:8} {outcome.kind:8} {name}")
            _write(f"         {outcome.message:.300}")


def _print_known(outcomes: Outcomes) -> None:
    """Write what fails, by the configurations in which it does."""
    found: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for name, _ in outcomes):
        ours = [c for n, c in outcomes if n == name and c not in ("plain", "torch")]
        worse = [c for c in ours if is_worse(outcomes, name, c)]
        if worse:
            found.setdefault(" ".join(worse), []).append(name)
    for configurations, names in found.items():
        _write(f"[{configurations}]", *names, "", sep="\n")


def _print_counts(outcomes: Outcomes, configurations: list[str]) -> None:
    _write(f"{'':10}", *(f"{kind:>9}" for kind in KINDS), f"{'worse':>9}")
    for configuration in configurations:
        found = [n for n, c in outcomes if c == configuration]
        counts = Counter(outcomes[n, configuration].kind for n in found)
        worse = sum(is_worse(outcomes, n, configuration) for n in found)
        row = [
            *(counts[kind] for kind in KINDS),
            worse if configuration != "torch" else 0,
        ]
        _write(f"{configuration:10}", *(f"{count:9}" for count in row))


def _write(*words: object, sep: str = " ") -> None:
    """Write words, and end the line."""
    sys.stdout.write(sep.join(map(str, words)) + "\n")


if __name__ == "__main__":
    main()
