"""The generated parts of docs/cli.md (exit codes from ``ciuic.errors``, options from the commands themselves) and docs/security.md.

``python -m ciuic.cli.reference docs/cli.md`` rewrites those of a page; a test fails while the page says something else.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import click

from ciuic.cli import INTERRUPTED, shared
from ciuic.cli.app import COMMANDS, cli
from ciuic.cli.commands.web.rights import rights_table
from ciuic.cli.shared.documents import Keys
from ciuic.errors import BY_EXIT_CODE


def exit_codes() -> str:
    """The table of exit codes."""
    meanings = {0: "Done.", INTERRUPTED: "Interrupted (^C, SIGTERM, SIGHUP)."}
    for code, kind in BY_EXIT_CODE.items():
        # CiuicError is the base of the others, and its docstring speaks of that.
        text = (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ")
        meanings[code] = "Failed; the message says why." if code == 1 else text
    rows = [f"| {code} | {meanings[code]} |" for code in sorted(meanings)]
    return "\n".join(["| code | meaning |", "| --- | --- |", *rows])


def options() -> str:
    """Each command with its usage line and its own options."""
    return "\n\n".join(_section(path, command) for path, command in _commands())


def _commands() -> Iterator[tuple[str, click.Command]]:
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        yield from _below(name, command)


def _is_in(words: list[str], text: list[str]) -> bool:
    return any(text[at : at + len(words)] == words for at in range(len(text)))


def _below(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """Yield the command, or those of a group at any depth."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for inner in sorted(command.list_commands(context)):
            below = command.get_command(context, inner)
            assert below is not None
            yield from _below(f"{path} {inner}", below)
    else:
        yield path, command


def _section(path: str, command: click.Command) -> str:
    context = click.Context(command, info_name=path)
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [f"### `ciuic {path} {usage}`", "", _prose(command.help or "")]
    rows = [
        param.get_help_record(context)
        for param in command.get_params(context)
        # The global options, hidden behind the command's name, have a section of the page written by hand.
        if isinstance(param, click.Option) and not param.hidden and "--help" not in param.opts
    ]
    if any(rows):
        lines += ["", *(f"* `{row[0]}`: {row[1]}" for row in rows if row is not None)]
    return "\n".join(lines)


def _prose(text: str) -> str:
    """A help text as Markdown: paragraphs joined, click's verbatim blocks fenced."""
    parts = []
    for block in inspect.cleandoc(text).split("\n\n"):
        if block.startswith("\b"):
            parts.append("```\n" + block.lstrip("\b\n") + "\n```")
        else:
            parts.append(block.replace("\n", " "))
    return "\n\n".join(parts)


def documents() -> str:
    """The table of the keys of each document of ``--json``, and of the larger objects in them."""
    # Parts of commands that are loaded where they are needed.
    for module in pkgutil.iter_modules(shared.__path__, f"{shared.__name__}."):
        importlib.import_module(module.name)
    order = {path: number for number, (path, _) in enumerate(_commands())}

    def place(keys: Keys) -> tuple[int, str]:
        named = re.findall(r"\w+", keys.title)
        return min(
            (-len(path.split()), number) for path, number in order.items() if _is_in(path.split(), named)
        )[1], keys.title

    rows = [f"| {keys.title} | {keys.markdown()} |" for keys in sorted(Keys.titled, key=place)]
    return "\n".join(["| object | keys |", "| --- | --- |", *rows])


PARTS: Final[dict[str, dict[str, Callable[[], str]]]] = {
    "cli.md": {"documents": documents, "exit codes": exit_codes, "options": options},
    "security.md": {"rights on the page": rights_table},
}
"""Generators of the parts of each page, by its name."""


def rewritten(page: str, name_of_page: str) -> str:
    """The page with every generated part as it should be. ValueError when a part's marks are missing."""
    for name, generate in PARTS[name_of_page].items():
        begin, end = f"<!-- generated: {name} -->", "<!-- end -->"
        pattern = re.compile(f"({re.escape(begin)}\n).*?({re.escape(end)})", re.DOTALL)
        if not pattern.search(page):
            raise ValueError(f"the page has no part {begin} … {end}")
        text = generate()
        # A function, because backslashes and \1 in a replacement text would be interpreted.
        page = pattern.sub(lambda match, text=text: match[1] + text + "\n" + match[2], page)  # type: ignore[misc]
    return page


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(rewritten(target.read_text(encoding="utf-8"), target.name), encoding="utf-8")
