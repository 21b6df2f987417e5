"""A fault in the core, made by hand, that the tests of its subject must notice."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One fault: ``old``, a text that occurs once in the file, is replaced by ``new``."""

    name: str
    path: str
    old: str
    new: str
    consequence: str
    """What a user would lose."""
    tests: tuple[str, ...]
    """Files and folders of tests, in the order in which they are tried."""
    subject: str = ""
    """Module of this package that has it."""

    def applied(self, text: str) -> str:
        """Return the text of the file with the fault. ValueError unless ``old`` occurs once."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: what is replaced occurs {count} times in {self.path}")
        return text.replace(self.old, self.new)
