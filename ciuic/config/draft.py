"""Configuration under construction: reads both formats, collects values, origins and every problem.

A draft never stops at a problem, so that all problems of a file are reported at once; `ciuic.config.load`
decides what to do about them.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli

from ciuic.config.flat import FlatSetting, is_flat, parse_flat
from ciuic.config.keys import FLAT_NAMES, FLAT_ROOTS_NAME, KEYS, ROOT_KEYS, TRAINER_KEYS, Key
from ciuic.config.model import (
    DEFAULT,
    AlertConfig,
    CaptureConfig,
    Config,
    ControlConfig,
    ExporterConfig,
    HoldsConfig,
    LogConfig,
    Origin,
    OverlayConfig,
    Problem,
    RepositoryConfig,
    RootConfig,
    ScheduleConfig,
    TrainerConfig,
    WatchConfig,
)
from ciuic.config.remotes import TABLE as REMOTE_TABLE
from ciuic.config.remotes import ReadRemote, read_remotes
from ciuic.config.toml_source import TomlPath, line_numbers, line_of, statements
from ciuic.protocol.passthrough_names import DEFAULT_MAPPED_NAMES, DEFAULT_TRACKED_NAMES
from ciuic.retention import RetentionPolicy


def raise_for(problems: Iterable[Problem]) -> None:
    """Raise the errors among ``problems`` as one, with the exit code of the first; do nothing for none."""
    errors = [problem for problem in problems if problem.severity == "error"]
    if len(errors) == 1:
        raise errors[0].error(str(errors[0]), hint=errors[0].hint)
    if errors:
        lines = (f"{problem} ({problem.hint})" if problem.hint else str(problem) for problem in errors)
        raise errors[0].error("\n".join(lines))


@dataclass
class Draft:
    """Configuration under construction: values so far, their origins, and the problems found."""

    file: Path | None
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    roots: list[RootConfig] = field(default_factory=list)
    trainers: list[TrainerConfig] = field(default_factory=list)
    remotes: list[ReadRemote] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def read(self, text: str) -> None:
        """Read ``text`` in the format of the file's name."""
        if self.file is not None and is_flat(self.file):
            self.read_flat(text)
        else:
            self.read_toml(text)

    def finish(self) -> Config:
        """Return the configuration; raise the problems found."""
        raise_for(self.problems)
        return self.build()

    def complain(self, message: str, line: int, hint: str = "") -> None:
        """Record an error at a line of the file."""
        self.problems.append(Problem("error", message, hint, self.at(line)))

    def at(self, line: int) -> Origin:
        """Return the origin of what stands at a line of the file."""
        return Origin("file", str(self.file), line)

    def put(self, key: Key, raw: object, origin: Origin, *, shown_name: str = "") -> None:
        """Parse and store the value of a key; record an error if it is invalid."""
        try:
            self.values[key.name] = key.parse(raw)
        except ValueError as error:
            self.problems.append(Problem("error", f"{shown_name or key.name}: {error}", origin=origin))
        else:
            self.origins[key.name] = origin

    def put_path(self, name: str, path: Path, origin: Origin) -> None:
        """Store a path given on the command line or in the environment."""
        # Relative to the working directory, where it was typed; it need not be UTF-8.
        self.values[name] = Path(os.path.abspath(path))
        self.origins[name] = origin

    # --- TOML

    def read_toml(self, text: str) -> None:
        """Read a TOML text."""
        try:
            document = tomli.loads(text)
        except tomli.TOMLDecodeError as error:
            self.complain(f"not TOML: {error.msg}", error.lineno)
            return
        # tomli raises it for values nested without end, which coverage-guided fuzzing found.
        except RecursionError:
            self.complain("values or names are nested too deeply", 1)
            return
        # Only after tomli has accepted the text: for others the positions mean nothing.
        lines = line_numbers(statements(text))
        for name, value in document.items():
            line = line_of(lines, (name,))
            if name in _LISTS:
                self.read_tables(name, value, lines)
            elif name in _TABLES:
                self.read_table(name, value, lines)
            elif name == REMOTE_TABLE:
                self.remotes = read_remotes(value, lines, self)
            elif name in KEYS:
                self.put(KEYS[name], value, self.at(line))
            else:
                self.unknown(name, [*KEYS, *_TABLES, *_LISTS, REMOTE_TABLE], line)

    def read_table(self, table: str, value: object, lines: Mapping[TomlPath, int]) -> None:
        """Read the keys of one table."""
        if not isinstance(value, dict):
            self.complain(f"{table} is a table: write [{table}]", line_of(lines, (table,)))
            return
        for name, item in value.items():
            dotted, line = f"{table}.{name}", line_of(lines, (table, name))
            if dotted in KEYS:
                self.put(KEYS[dotted], item, self.at(line))
            elif name in KEYS or name in (*_LISTS, REMOTE_TABLE):
                # The most frequent mistake with TOML: a top-level key written after a table's header belongs
                # to that table.
                self.complain(
                    f"unknown key {dotted}",
                    line,
                    f"{name} belongs to no table: move it above the first [table]",
                )
            else:
                self.unknown(dotted, KEYS, line)

    def read_tables(self, kind: str, value: object, lines: Mapping[TomlPath, int]) -> None:
        """Read a list of tables, such as [[root]]."""
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            self.complain(f"{kind} is a list of tables: write [[{kind}]] for each", line_of(lines, (kind,)))
            return
        for index, table in enumerate(value):
            path: TomlPath = (kind, index)
            values = self.read_one(kind, table, path, lines)
            line = line_of(lines, path)
            if kind == "root":
                self.add_root(table, values, line)
            else:
                self.add_trainer(table, values, line)

    def read_one(
        self, kind: str, table: dict[str, object], path: TomlPath, lines: Mapping[TomlPath, int]
    ) -> dict[str, Any]:
        """Return the valid values of one table of a list; record an error for each other."""
        values: dict[str, Any] = {}
        known = _LISTS[kind]
        for name, raw in table.items():
            line = line_of(lines, (*path, name))
            if name not in known:
                self.unknown(name, known, line, shown=f"{kind}.{name}")
                continue
            try:
                values[name] = known[name].parse(raw)
            except ValueError as error:
                self.complain(f"{kind}.{name}: {error}", line)
        return values

    def add_root(self, table: dict[str, object], values: dict[str, Any], line: int) -> None:
        """Add a root whose keys have been read."""
        if "path" in values:
            self.roots.append(RootConfig(**values, origin=self.at(line)))
        elif "path" not in table:
            self.complain("a [[root]] without a path", line)

    def add_trainer(self, table: dict[str, object], values: dict[str, Any], line: int) -> None:
        """Add a trainer whose keys have been read."""
        if "name" not in table:
            self.complain("a [[trainer]] without a name", line)
        elif any(trainer.name == values.get("name") for trainer in self.trainers):
            self.complain(f"a second [[trainer]] with the name {values['name']}", line)
        elif ("heartbeat_file" in table) != ("heartbeat" in table):
            self.complain("heartbeat_file and heartbeat must be set together", line)
        elif "pid_file" not in table and "heartbeat_file" not in table:
            self.complain("a [[trainer]] needs a pid_file, or a heartbeat_file and heartbeat", line)
        # Otherwise an error has been recorded for the invalid value.
        elif len(values) == len(table):
            # The field has its unit in its name; the key in the file is a duration with a unit.
            values["heartbeat_seconds"] = values.pop("heartbeat", 0)
            self.trainers.append(TrainerConfig(**values, origin=self.at(line)))

    # --- the flat format

    def read_flat(self, text: str) -> list[FlatSetting]:
        """Read a text in the flat format and return its settings."""
        settings, errors = parse_flat(text)
        for error in errors:
            self.complain(str(error), error.line)
        for name, value, line in settings:
            if name == FLAT_ROOTS_NAME:
                self.read_flat_roots(value, line)
            elif name in FLAT_NAMES:
                self.put(KEYS[FLAT_NAMES[name]], value, self.at(line), shown_name=name)
            elif name.partition(".")[0] == REMOTE_TABLE:
                hint = "`ciuic config convert` makes a TOML file of this one"
                self.complain(f"the flat format has no remotes, got {name}", line, hint)
            else:
                self.unknown(name, [*FLAT_NAMES, FLAT_ROOTS_NAME], line)
        return settings

    def read_flat_roots(self, paths: str | list[str], line: int) -> None:
        """Add the roots of the flat format's list."""
        for path in paths:
            try:
                self.roots.append(RootConfig(ROOT_KEYS["path"].parse(path), origin=self.at(line)))
            except ValueError as error:
                self.complain(f"{FLAT_ROOTS_NAME}: {error}", line)

    # --- all

    def unknown(self, name: str, known: Iterable[str], line: int, *, shown: str = "") -> None:
        """Record an unknown key, with the key that was probably meant."""
        hint = suggestion(name, known) or "`ciuic config example` prints every key"
        self.complain(f"unknown key {shown or name}", line, hint)

    def build(self) -> Config:
        """Return the configuration, with defaults for everything not set."""
        values: dict[str, Any] = {
            # Defaults go through the same parsers as values of a file, so both have one form.
            name: self.values.get(name, key.parse(_default(key)) if key.default else _EMPTY.get(name))
            for name, key in KEYS.items()
        }
        # Its default follows daemon.runtime_dir.
        if "control.socket" not in self.values:
            values["control.socket"] = values["daemon.runtime_dir"] / "control.sock"
        retention = RetentionPolicy(
            keep_within_seconds=values["retention.keep_within"],
            keep_safety_seconds=values["retention.keep_safety"],
            **{name: values[f"retention.{name}"] for name in _POLICY_NAMES},
        )
        return Config(
            roots=tuple(self.roots),
            exclude=values["exclude"],
            repository=RepositoryConfig(
                values["repository.path"],
                values["repository.block_size"],
                values["repository.trust_owner"],
                values["repository.reserve"],
            ),
            schedule=ScheduleConfig(values["schedule.interval"]),
            retention=retention,
            min_free=values["retention.min_free"],
            capture=CaptureConfig(
                values["capture.io_priority"],
                values["capture.min_share"],
                values["capture.finish_within"],
                values["capture.undo_limit"],
            ),
            overlay=OverlayConfig(values["overlay.tracked_names"], values["overlay.mapped_names"]),
            control=ControlConfig(values["control.socket"], values["control.group"]),
            watch=WatchConfig(values["watch.users"], values["watch.emergency_per_hour"]),
            exporter=ExporterConfig(values["exporter.listen"]),
            holds=HoldsConfig(values["holds.max_of_a_user"], values["holds.max_of_a_user_per_hour"]),
            alert=AlertConfig(values["alert.command"], values["alert.user"], values["alert.timeout"]),
            trainers=tuple(self.trainers),
            remotes=tuple(read.config(retention) for read in self.remotes),
            runtime_dir=values["daemon.runtime_dir"],
            log=LogConfig(values["log.level"], values["log.format"]),
            file=self.file,
            origins={name: self.origins.get(name, DEFAULT) for name in KEYS},
        )


_LISTS: Mapping[str, Mapping[str, Key]] = {"root": ROOT_KEYS, "trainer": TRAINER_KEYS}
_TABLES = tuple(dict.fromkeys(name.partition(".")[0] for name in KEYS if "." in name))
_POLICY_NAMES = (
    "keep_last",
    "keep_hourly",
    "keep_daily",
    "keep_weekly",
    "keep_monthly",
    "keep_yearly",
    "keep_tags",
    "keep_emergency",
)
# Defaults of the keys whose default is no text that their parser takes.
_EMPTY: dict[str, Any] = {
    "exclude": (),
    "retention.keep_tags": (),
    "watch.users": (),
    "alert.command": (),
    "overlay.tracked_names": DEFAULT_TRACKED_NAMES,
    "overlay.mapped_names": DEFAULT_MAPPED_NAMES,
}


def _default(key: Key) -> object:
    # Parsers of counts take integers alone, as TOML has them.
    return int(key.default) if key.default.isdigit() else key.default


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ``did you mean …?`` for the nearest of ``known``; an empty text when none is near."""
    by_text = {text.casefold(): text for text in known}
    for text in list(by_text.values()):
        # A key without its section, such as `interval`, means the one that ends so.
        by_text.setdefault(text.rpartition(".")[2].casefold(), text)
    # The name of one format may have been written in a file of the other.
    for flat_name, dotted in FLAT_NAMES.items():
        if dotted in by_text.values():
            by_text.setdefault(flat_name, dotted)
        elif flat_name in by_text:
            by_text.setdefault(dotted, flat_name)
            by_text.setdefault(dotted.rpartition(".")[2], flat_name)
    section, _, last = name.casefold().rpartition(".")
    # A known section is in all of its keys: compared as a whole, every short key of it would be near.
    is_known_section = bool(section) and any(text.startswith(f"{section}.") for text in by_text)
    for wanted in (last,) if is_known_section else (name.casefold(), last):
        near = difflib.get_close_matches(wanted, by_text, n=1, cutoff=0.6)
        if near:
            return f"did you mean {by_text[near[0]]}?"
    return ""
