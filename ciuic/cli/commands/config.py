"""``ciuic config``: what is in force and where each value comes from; whether a file can be meant; the way to TOML."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ciuic.cli.shared.messages import complain, shown_text, styled, warn
from ciuic.cli.shared.options import HOST_PATH, FrameCommand, FrameGroup
from ciuic.cli.shared.output import Column, json_option, note, out, out_json, show_table
from ciuic.cli.shared.session import current

if TYPE_CHECKING:
    from ciuic.config import Config, Problem

EXAMPLES: Final = (
    "ciuic.toml",
    "alert.sh",
    "monitoring/rules.yml",
    "monitoring/rules_test.yml",
    "monitoring/dashboard.json",
    "monitoring/prometheus.yml",
)


@click.group("config", cls=FrameGroup)
def command() -> None:
    """Show, check or convert the configuration."""


@command.command("show", cls=FrameCommand)
@json_option
def show(as_json: bool) -> None:
    """Print what is in force, and where each value comes from."""
    from ciuic.config import shown

    session = current()
    rows = list(shown(session.config))
    file = session.config.file
    if as_json:
        values = [
            {"key": row.key, "value": row.value, "origin": str(row.origin), "origin_kind": row.origin.kind}
            for row in rows
        ]
        out_json({"config": None if file is None else str(file), "values": values})
        return

    note(f"configuration file: {file if file is not None else 'none'}")
    show_table(
        [Column("KEY"), Column("VALUE", shrink=True), Column("ORIGIN", shrink=True)],
        [(row.key, shown_text(row.value) or "-", shown_text(str(row.origin))) for row in rows],
    )


@command.command("check", cls=FrameCommand)
@click.argument("file", required=False, type=HOST_PATH)
@json_option
def check(file: bytes | None, as_json: bool) -> int:
    """Say everything that is wrong with the configuration, with line numbers. Exit 2 if anything must be mended."""
    from ciuic.config import check_file, check_places, check_text, find_file, read_text

    session = current()
    # Not by way of session.config, which raises: a file with mistakes, or of another user, is to be reported
    # in full.
    path = Path(os.fsdecode(file)) if file is not None else find_file(session.config_option)
    problems: list[Problem] = []
    config: Config | None
    if path is None:
        config = session.config
    else:
        config, problems = check_text(read_text(path), path)
        if (foreign := check_file(path)) is not None:
            problems = [foreign, *problems]
    if config is not None:
        # Only of a file that could be parsed: defaults in the place of mistakes would cause problems of their
        # own.
        problems = [*problems, *check_places(config), *_protects_nothing(config)]
    errors = [problem for problem in problems if problem.severity == "error"]
    if as_json:
        out_json(
            {
                "config": None if path is None else str(path),
                "valid": not errors,
                "problems": [_as_document(problem) for problem in problems],
            }
        )
    else:
        for problem in problems:
            _say(problem)
        subject = (
            "no configuration file: the defaults are in force" if path is None else shown_text(str(path))
        )
        if not errors:
            out(f"{subject}: fine" if not problems else f"{subject}: usable")
    # The code with which the daemon would refuse to start: 3 for a root that does not exist, 2 for most
    # others.
    return errors[0].error.exit_code if errors else 0


def _protects_nothing(config: Config) -> list[Problem]:
    """A warning where no root is named: such a file is valid, and nothing is in any snapshot."""
    from ciuic.config import FLAT_ROOTS_NAME, Problem
    from ciuic.config.keys import is_flat

    if config.roots:
        return []
    hint = "ciuic protect PATH"
    if config.file is not None and is_flat(config.file):
        hint += f", which writes: {FLAT_ROOTS_NAME} = PATH"
    return [Problem("warning", "no directory is named to be protected, so nothing is", hint)]


def _as_document(problem: Problem) -> dict[str, Any]:
    return {
        "severity": problem.severity,
        "message": problem.message,
        "hint": problem.hint,
        "file": problem.origin.name if problem.origin.kind == "file" else None,
        "line": problem.origin.line or None,
    }


def _say(problem: Problem) -> None:
    if problem.severity == "warning":
        warn(shown_text(str(problem)), hint=problem.hint)
        return
    complain(styled("error: ", fg="red") + shown_text(str(problem)))
    if problem.hint:
        complain(f"  {problem.hint}")


@command.command("convert", cls=FrameCommand)
@click.argument("file", type=HOST_PATH)
def convert(file: bytes) -> None:
    """Print a flat `key = value` file as TOML of the same meaning."""
    from ciuic.config import convert_flat, read_text

    path = Path(os.fsdecode(file))
    out(convert_flat(read_text(path), path), newline=False)


@command.command("example", cls=FrameCommand)
@click.argument("name", type=click.Choice(EXAMPLES), metavar=f"[{'|'.join(EXAMPLES)}]", default=EXAMPLES[0])
def example(name: str) -> None:
    """Print an example: a configuration with every key explained, a script for alert.command, files for Prometheus and Grafana.

    \b
    ciuic config example ciuic.toml > /etc/ciuic/ciuic.toml
    ciuic config example alert.sh | install -m 755 /dev/stdin /etc/ciuic/alert.sh
    ciuic config example monitoring/rules.yml > /etc/prometheus/ciuic-rules.yml
    """  # noqa: D301  click's mark of a paragraph that is not wrapped is the character \b
    from ciuic.cli.shared.systemd import shipped_text

    out(shipped_text("etc", name), newline=False)
