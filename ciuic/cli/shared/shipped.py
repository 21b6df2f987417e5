"""Files that are installed with the program: unit files and examples."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from ciuic.errors import CiuicError


def shipped_text(folder: str, name: str) -> str:
    """The file as shipped: in data/ of the installed package, or in the folder of a checkout."""
    # The wheel has the files in ciuic/data; an editable installation runs from the checkout, which has them
    # at the top.
    package = Path(str(resources.files("ciuic")))
    for candidate in (package / "data" / folder / name, package.parent / folder / name):
        if candidate.is_file():
            return candidate.read_text(encoding="utf-8")
    raise CiuicError(
        f"this installation lacks the file {folder}/{name}",
        hint="install ciuic again, as a package or with pip",
    )
