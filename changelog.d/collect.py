"""Put the fragments of changelog.d into CHANGELOG.md as the section of a version: ``python changelog.d/collect.py 0.3.0``.

Exits with 1 and changes nothing where a fragment has an unknown type or no text, or where there is none at all.
"""

from __future__ import annotations

import datetime
import os
import sys
import textwrap
import time
from pathlib import Path

TYPES = ("security", "removed", "changed", "fixed", "added")
"""Sections of the changelog in their order: first what users may have to act on."""
WIDTH = 150


def section(directory: Path, version: str, date: str) -> str:
    """Return the section of a version. ValueError names the fragment that is wrong."""
    found: dict[str, list[str]] = {kind: [] for kind in TYPES}
    for path in sorted(directory.glob("*.*.md")):
        kind = path.name.split(".")[-2]
        text = " ".join(path.read_text(encoding="utf-8").split())
        if kind not in found:
            raise ValueError(f"{path.name}: expected one of {', '.join(TYPES)} before .md, got {kind!r}")
        if not text:
            raise ValueError(f"{path.name}: expected a sentence, got an empty file")
        found[kind].append(text)
    if not any(found.values()):
        raise ValueError(f"{directory}: expected fragments NAME.TYPE.md, got none")
    parts = [f"## {version} ({date})\n"]
    for kind, texts in found.items():
        if texts:
            entries = (textwrap.fill(text, WIDTH, initial_indent="- ", subsequent_indent="  ",
                                     break_long_words=False, break_on_hyphens=False) for text in texts)  # fmt: skip
            parts.append(f"### {kind.capitalize()}\n\n" + "\n".join(entries) + "\n")
    return "\n".join(parts)


def collect(directory: Path, changelog: Path, version: str, date: str) -> None:
    """Write the section above that of the version before, and remove the fragments. ValueError as `section`."""
    new = section(directory, version, date)
    intro, mark, rest = changelog.read_text(encoding="utf-8").partition("\n## ")
    changelog.write_text(f"{intro}\n{new}{mark}{rest}", encoding="utf-8")
    for path in directory.glob("*.*.md"):
        path.unlink()


def main() -> int:
    """Collect for the version that the command line names."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: collect.py VERSION\n")
        return 2
    directory = Path(__file__).resolve().parent
    time_s = int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))
    today = datetime.datetime.fromtimestamp(time_s, datetime.timezone.utc).date().isoformat()
    try:
        collect(directory, directory.parent / "CHANGELOG.md", sys.argv[1], today)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
