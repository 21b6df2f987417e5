"""Build hooks of the wheel: its version, from the tags of the history, and its manual pages, from docs/cli.md.

``python .ci/build.py`` prints the version of the checkout. It is written here and not by setuptools-scm because no two contents may
share a name, which takes more than a tag: that looks neither at untracked files, which are built in, nor at what was changed.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.builders.sdist import SdistBuilder

ROOT = Path(__file__).resolve().parents[1]
_RELEASE = r"(\d+)\.(\d+)\.(\d+)"


def version() -> str:
    """Return the version of this tree (PEP 440), the same for no other content.

    | tree | version |
    | --- | --- |
    | tag v0.3.0, nothing changed | 0.3.0 |
    | five commits after tag v0.2.0 | 0.3.0.dev5+g1a2b3c4d5e |
    | the same with changed or new files | 0.3.0.dev5+g1a2b3c4d5e.dirty.x6f7a8b9c0d, by the content |
    | no tag to be seen (shallow clone) | 0.2.0+g1a2b3c4d5e: the release in CHANGELOG.md, or anything after it |
    | no history (an exported tree, no git) | 0.2.0+source.x6f7a8b9c0d, by the content |
    """
    described = _git(
        "describe", "--tags", "--long", "--always", "--abbrev=10", "--match=v[0-9]*.[0-9]*.[0-9]*"
    )
    if not described:
        return f"{_newest_release()}+source.{_content()}"
    tagged = re.fullmatch(rf"v{_RELEASE}-(\d+)-g(\w+)", described)
    dirty = f".dirty.{_content()}" if _git("status", "--porcelain") else ""
    if tagged is None:
        return f"{_newest_release()}+g{described}{dirty}"
    major, minor, patch, distance, commit = tagged.groups()
    if distance == "0" and not dirty:
        return f"{major}.{minor}.{patch}"
    return f"{major}.{int(minor) + 1}.0.dev{distance}+g{commit}{dirty}"


def _git(*arguments: str) -> str | None:
    """Return what git says of this tree; None where it has no history of its own, or there is no git."""
    # Named, and not searched for: a tree that was unpacked within another one's history is no part of it.
    place = (f"--git-dir={ROOT}/.git", f"--work-tree={ROOT}")
    try:
        done = subprocess.run(
            ("git", *place, *arguments), cwd=ROOT, check=False, capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _newest_release() -> str:
    found = re.search(rf"(?m)^## ({_RELEASE})", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    return found[1] if found else "0.0.0"


def _content() -> str:
    """Name the content of what is published, a label that has a letter: PEP 440 strips zeros from numbers."""
    digest = hashlib.sha256()
    for file in sorted(
        SdistBuilder(str(ROOT)).recurse_included_files(), key=lambda file: file.distribution_path
    ):
        content = Path(file.path).read_bytes()
        digest.update(f"{file.distribution_path}\0{len(content)}\0".encode() + content)
    return f"x{digest.hexdigest()[:10]}"


def manual(page: str) -> dict[str, str]:
    """Return the manual pages in docs/cli.md, by their names: of all commands, and one of each.

    No command is imported, because that takes libraries that a build has no need of.
    """
    general, _, commands = page.partition("\n## Commands and options\n")
    found = re.findall(
        r"(?ms)^### `ciuic (([a-z-]+(?: [a-z-]+)*)[^`]*)`\n\n(.*?)(?=^### |^<!-- end)", commands
    )
    parts = dict(re.findall(r"(?ms)^## ([^\n]*)\n\n(.*?)(?=^## |\Z)", general))
    pages = {}
    listed = ""
    for usage, path, text in found:
        name, summary = f"ciuic-{path.replace(' ', '-')}", text.partition("\n")[0]
        first = re.split(r"(?<=\w)[.:;] ", summary + " ")[0]
        about, mark, options = text.partition("\n* `")
        options = f".SH OPTIONS\n{_roff(mark + options)}" if mark else ""
        pages[name] = (
            f"{_head(name, first, 'ciuic ' + usage)}{_roff(about)}{options}.SH SEE ALSO\n.BR ciuic (1)\n"
        )
        listed += f"* `{path}`: {summary}\n"
    about = parts["What holds for every command"]
    description = (
        f"{_roff(about)}.SH COMMANDS\n{_roff(listed)}.SH EXIT STATUS\n{_roff(parts['Exit codes'], rows=True)}"
    )
    summary = "copy-on-write snapshots under a running job, and an exact way back"
    pages["ciuic"] = _head("ciuic", summary, "ciuic [OPTIONS] COMMAND [ARGS]...") + description
    return pages


def _head(name: str, summary: str, usage: str) -> str:
    # Not hyphenated and not filled to both sides: what is copied from the page is right.
    return (
        f'.TH {_plain(name.upper())} 1 "" ciuic\n.nh\n.ad l\n.SH NAME\n{_plain(name)} \\- {_inline(summary)}\n'
        f".SH SYNOPSIS\n{_inline(usage)}\n.SH DESCRIPTION\n"
    )


def _roff(text: str, rows: bool = False) -> str:
    """Turn the Markdown that docs/cli.md has into man(7); of tables only the ``rows`` of two columns."""
    lines = []
    for block in re.split(r"\n\n(?![^`]*\n```\n)|\n(?=\* )", re.sub(r"(?m)^<!--.*-->\n", "", text).strip()):
        cells = re.findall(r"(?m)^\| (\d+) \| (.*) \|$", block)
        if block.startswith("```"):
            inside = "\n".join(_plain(line) for line in block.splitlines()[1:-1])
            lines.append(f".PP\n.RS 4\n.nf\n{inside}\n.fi\n.RE")
        elif option := re.match(r"\* `([^`]+)`: ", block):
            lines.append(f".TP\n{_inline(f'**{option[1]}**')}\n{_inline(block[option.end() :])}")
        elif block.startswith("|"):
            lines += (f".TP\n{code}\n{_inline(meaning)}" for code, meaning in cells if rows)
        elif block:
            lines.append(f".PP\n{_inline(block)}")
    return "\n".join(lines) + "\n"


def _inline(text: str) -> str:
    # Links and *emphasis* are their words.
    text = re.sub(r"\[([^]]+)\]\([^)]+\)|(?<!\*)\*(\w+)\*(?!\*)", r"\1\2", " ".join(text.split()))
    return re.sub(r"\*\*(.+?)\*\*|`(.+?)`", lambda found: f"\\fB{found[1] or found[2]}\\fR", _plain(text))


# What is not itself in troff. A line may end within a long list of choices.
_ESCAPES = {"\\": r"\e", "-": r"\-", "|": r"|\:", "'": r"\(aq", "^": r"\(ha", "~": r"\(ti"}


def _plain(text: str) -> str:
    text = "".join(_ESCAPES.get(one, one if one.isascii() else f"\\[u{ord(one):04X}]") for one in text)
    # A point would begin a request.
    return re.sub(r"^\.", r"\&.", text)


class Hook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts into a wheel what the checkout does not have."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the files of the wheel that are made; an editable installation has none."""
        self._made = Path(tempfile.mkdtemp())
        if version != "editable":
            module = self._made / "_version.py"
            module.write_text(f'__version__ = "{self.metadata.version}"\n')
            build_data["force_include"][str(module)] = "ciuic/_version.py"
            for name, text in manual((ROOT / "docs/cli.md").read_text(encoding="utf-8")).items():
                page = self._made / f"{name}.1"
                page.write_text(text, encoding="utf-8")
                build_data["shared_data"][str(page)] = f"share/man/man1/{page.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what `initialize` made."""
        shutil.rmtree(self._made)


if __name__ == "__main__":
    print(version())
