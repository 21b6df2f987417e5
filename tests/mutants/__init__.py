"""Faults in the core, made by hand: what a tired engineer would get wrong, and what a user would lose by it.

`make torture ARGS=mutants` has the tests look for each (tests/torture/mutants.py). A file for each subject: ``tests`` are the files and
folders of its tests, in the order in which they are tried, after those that a mutant names itself as ``first``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import tomli


class Mutant(NamedTuple):
    """One fault: ``old``, a text that occurs once in the file, is replaced by ``new``."""

    subject: str
    name: str
    path: str
    old: str
    new: str
    consequence: str
    """What a user would lose."""
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """Return the text of the file with the fault. ValueError unless ``old`` occurs once."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: what is replaced occurs {count} times in {self.path}")
        return text.replace(self.old, self.new)


def _read() -> Iterator[Mutant]:
    for file in sorted(Path(__file__).parent.glob("*.toml")):
        document = tomli.loads(file.read_text(encoding="utf-8"))
        for mutant in document["mutant"]:
            tests = tuple(dict.fromkeys([*mutant.pop("first", ()), *document.get("tests", ())]))
            yield Mutant(file.stem, **mutant, tests=tests)


MUTANTS = tuple(_read())
