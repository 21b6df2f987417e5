"""From files and environment to a Config, with everything that is wrong named by file and line.

Guarantees: what comes back is complete and valid as far as text can tell; whether the places it names exist is
ciuic.config.places' business. Unknown keys are errors. All errors of a file are found in one go. Reads exactly one
file: ``--config`` or CIUIC_CONFIG; else ``/etc/ciuic/ciuic.toml``; else the flat ``/etc/ciuric.conf``; else none.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli

from ciuic.config.flat import FlatSetting, flat_to_toml, is_flat, parse_flat
from ciuic.config.keys import FLAT_NAMES, FLAT_ROOTS_NAME, KEYS, ROOT_KEYS, TRAINER_KEYS, Key
from ciuic.config.model import (
    DEFAULT,
    AlertConfig,
    CaptureConfig,
    Config,
    ControlConfig,
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
from ciuic.config.owners import refuse_foreign_file
from ciuic.config.toml_source import TomlPath, line_numbers, line_of, statements
from ciuic.errors import CiuicError, ConfigError, NotPermitted
from ciuic.open_names import DEFAULT_MAPPED_NAMES, DEFAULT_TRACKED_NAMES
from ciuic.retention import RetentionPolicy

TOML_FILE = Path("/etc/ciuic/ciuic.toml")
FLAT_FILE = Path("/etc/ciuric.conf")
CONFIG_VARIABLE = "CIUIC_CONFIG"
REPOSITORY_VARIABLE = "CIUIC_REPO"
MAX_SYNTAX_ERRORS = 20
"""A file with more lines that are no TOML was not meant to be a configuration; each costs a parse of the whole."""


def load_config(
    file: Path | None = None,
    *,
    repository: Path | None = None,
    trust_repository: bool = False,
    environ: Mapping[str, str] | None = None,
    searched: Iterable[Path] = (TOML_FILE, FLAT_FILE),
) -> Config:
    """The effective configuration. ``file``, ``repository`` and ``trust_repository`` are the values of --config, --repo and
    --trust-repository.

    Raises ConfigError listing every mistake, also where this is root and others may write the file; NotPermitted when the file may
    not be read.
    """
    environ = os.environ if environ is None else environ
    path = find_file(file, environ=environ, searched=searched)
    draft = _Draft(path)
    if path is not None:
        refuse_foreign_file(path)
        draft.read(read_text(path))
    if repository is not None:
        draft.put_path("repository.path", repository, Origin("option", "--repo"))
    elif environ.get(REPOSITORY_VARIABLE):
        variable = Origin("environment", REPOSITORY_VARIABLE)
        draft.put_path("repository.path", Path(environ[REPOSITORY_VARIABLE]), variable)
    if trust_repository:
        draft.values["repository.trust_owner"] = True
        draft.origins["repository.trust_owner"] = Origin("option", "--trust-repository")
    return draft.finish()


def find_file(
    file: Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    searched: Iterable[Path] = (TOML_FILE, FLAT_FILE),
) -> Path | None:
    """Which file is in force: named ones must exist; of the usual places the first that does; None for none."""
    environ = os.environ if environ is None else environ
    if file is None and environ.get(CONFIG_VARIABLE):
        file = Path(environ[CONFIG_VARIABLE])
    if file is not None:
        return file
    return next((path for path in searched if os.path.lexists(path)), None)


def parse_config(text: str, file: Path) -> Config:
    """The configuration that ``text``, as the content of ``file``, means. ConfigError listing every mistake."""
    draft = _Draft(file)
    draft.read(text)
    return draft.finish()


def parse_leniently(file: Path | None) -> Config:
    """The configuration with a default for everything in ``file`` that is not valid; all defaults if it cannot be read."""
    draft = _Draft(file)
    if file is not None:
        with suppress(CiuicError):
            text = read_text(file)
            draft.read(text if is_flat(file) else _without_syntax_errors(text))
    return draft.build()


def _without_syntax_errors(text: str) -> str:
    """TOML text with each line at which parsing fails left empty; empty if more of them fail than a typo explains."""
    lines = text.splitlines()
    for _ in range(MAX_SYNTAX_ERRORS):
        try:
            tomli.loads("\n".join(lines))
        except tomli.TOMLDecodeError as error:
            if lines:
                lines[min(error.lineno, len(lines)) - 1] = ""
        except RecursionError:
            break
        else:
            return "\n".join(lines)
    return ""


def check_text(text: str, file: Path) -> tuple[Config | None, list[Problem]]:
    """Every problem of ``text``, and the configuration when there is no error among them."""
    draft = _Draft(file)
    draft.read(text)
    return (None if draft.problems else draft.build()), draft.problems


def convert_flat(text: str, file: Path) -> str:
    """The TOML text that means what the flat ``text`` does. ConfigError when it means nothing."""
    draft = _Draft(file)
    settings = draft.read_flat(text)
    draft.finish()
    return flat_to_toml(settings)


def read_text(path: Path) -> str:
    """The text of a configuration file; a clear error when there is none."""
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}") from None
    except PermissionError:
        raise NotPermitted(
            f"{path} may not be read", hint="run as root, or name another file with --config"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def raise_for(problems: Iterable[Problem]) -> None:
    """Raises the errors among ``problems`` as one, with the exit code of the first; does nothing for none."""
    errors = [problem for problem in problems if problem.severity == "error"]
    if len(errors) == 1:
        raise errors[0].error(str(errors[0]), hint=errors[0].hint)
    if errors:
        lines = (f"{problem} ({problem.hint})" if problem.hint else str(problem) for problem in errors)
        raise errors[0].error("\n".join(lines))


@dataclass
class _Draft:
    """A configuration in the making: values so far, where they came from, what was wrong."""

    file: Path | None
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    roots: list[RootConfig] = field(default_factory=list)
    trainers: list[TrainerConfig] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def read(self, text: str) -> None:
        if self.file is not None and is_flat(self.file):
            self.read_flat(text)
        else:
            self.read_toml(text)

    def finish(self) -> Config:
        raise_for(self.problems)
        return self.build()

    def complain(self, message: str, line: int, hint: str = "") -> None:
        self.problems.append(Problem("error", message, hint, self.at(line)))

    def at(self, line: int) -> Origin:
        return Origin("file", str(self.file), line)

    def put(self, key: Key, raw: object, origin: Origin, *, shown_name: str = "") -> None:
        try:
            self.values[key.name] = key.parse(raw)
        except ValueError as error:
            self.problems.append(Problem("error", f"{shown_name or key.name}: {error}", origin=origin))
        else:
            self.origins[key.name] = origin

    def put_path(self, name: str, path: Path, origin: Origin) -> None:
        # Given on a command line, so relative to where that was typed; bytes that are no text are welcome here.
        self.values[name] = Path(os.path.abspath(path))
        self.origins[name] = origin

    # --- TOML

    def read_toml(self, text: str) -> None:
        try:
            document = tomli.loads(text)
        except tomli.TOMLDecodeError as error:
            self.complain(f"not TOML: {error.msg}", error.lineno)
            return
        except RecursionError:
            self.complain("values or names are nested deeper than anything that can be meant", 1)
            return
        lines = line_numbers(statements(text))
        for name, value in document.items():
            line = line_of(lines, (name,))
            if name in _LISTS:
                self.read_tables(name, value, lines)
            elif name in _TABLES:
                self.read_table(name, value, lines)
            elif name in KEYS:
                self.put(KEYS[name], value, self.at(line))
            else:
                self.unknown(name, [*KEYS, *_TABLES, *_LISTS], line)

    def read_table(self, table: str, value: object, lines: Mapping[TomlPath, int]) -> None:
        if not isinstance(value, dict):
            self.complain(f"{table} is a table: write [{table}]", line_of(lines, (table,)))
            return
        for name, item in value.items():
            dotted, line = f"{table}.{name}", line_of(lines, (table, name))
            if dotted in KEYS:
                self.put(KEYS[dotted], item, self.at(line))
            elif name in KEYS or name in _LISTS:
                # The commonest slip with TOML: a top-level key written after a table's header belongs to the table.
                self.complain(
                    f"unknown key {dotted}",
                    line,
                    f"{name} belongs to no table: move it above the first [table]",
                )
            else:
                self.unknown(dotted, KEYS, line)

    def read_tables(self, kind: str, value: object, lines: Mapping[TomlPath, int]) -> None:
        """The tables of a list of them, such as [[root]]."""
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
        if "path" in values:
            self.roots.append(RootConfig(**values, origin=self.at(line)))
        elif "path" not in table:
            self.complain("a [[root]] without a path", line)

    def add_trainer(self, table: dict[str, object], values: dict[str, Any], line: int) -> None:
        if "name" not in table:
            self.complain("a [[trainer]] without a name", line)
        elif any(trainer.name == values.get("name") for trainer in self.trainers):
            self.complain(f"a second [[trainer]] with the name {values['name']}", line)
        elif ("heartbeat_file" in table) != ("heartbeat" in table):
            self.complain("heartbeat_file and heartbeat say something together only", line)
        elif "pid_file" not in table and "heartbeat_file" not in table:
            self.complain("a [[trainer]] needs a pid_file, or a heartbeat_file and heartbeat", line)
        elif len(values) == len(table):  # else what is wrong has been said
            values["heartbeat_seconds"] = values.pop("heartbeat", 0)
            self.trainers.append(TrainerConfig(**values, origin=self.at(line)))

    # --- the flat format

    def read_flat(self, text: str) -> list[FlatSetting]:
        settings, errors = parse_flat(text)
        for error in errors:
            self.complain(str(error), error.line)
        for name, value, line in settings:
            if name == FLAT_ROOTS_NAME:
                self.read_flat_roots(value, line)
            elif name in FLAT_NAMES:
                self.put(KEYS[FLAT_NAMES[name]], value, self.at(line), shown_name=name)
            else:
                self.unknown(name, [*FLAT_NAMES, FLAT_ROOTS_NAME], line)
        return settings

    def read_flat_roots(self, paths: str | list[str], line: int) -> None:
        for path in paths:
            try:
                self.roots.append(RootConfig(ROOT_KEYS["path"].parse(path), origin=self.at(line)))
            except ValueError as error:
                self.complain(f"{FLAT_ROOTS_NAME}: {error}", line)

    # --- all

    def unknown(self, name: str, known: Iterable[str], line: int, *, shown: str = "") -> None:
        self.complain(f"unknown key {shown or name}", line, suggestion(name, known))

    def build(self) -> Config:
        values: dict[str, Any] = {
            name: self.values.get(name, key.parse(_default(key)) if key.default else _EMPTY.get(name))
            for name, key in KEYS.items()
        }
        if "control.socket" not in self.values:
            values["control.socket"] = values["daemon.runtime_dir"] / "control.sock"
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
            retention=RetentionPolicy(
                keep_within_seconds=values["retention.keep_within"],
                keep_safety_seconds=values["retention.keep_safety"],
                **{name: values[f"retention.{name}"] for name in _POLICY_NAMES},
            ),
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
            holds=HoldsConfig(values["holds.max_of_a_user"], values["holds.max_of_a_user_per_hour"]),
            alert=AlertConfig(values["alert.command"], values["alert.user"], values["alert.timeout"]),
            trainers=tuple(self.trainers),
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
_EMPTY: dict[str, Any] = {
    "exclude": (),
    "retention.keep_tags": (),
    "watch.users": (),
    "alert.command": (),
    "overlay.tracked_names": DEFAULT_TRACKED_NAMES,
    "overlay.mapped_names": DEFAULT_MAPPED_NAMES,
}
"""Values of the keys whose default is no text that their parser takes."""


def _default(key: Key) -> object:
    return int(key.default) if key.default.isdigit() else key.default


def suggestion(name: str, known: Iterable[str]) -> str:
    """``did you mean …?`` for the nearest of ``known``, or of their last parts; empty when none is near."""
    by_text = {text.casefold(): text for text in known}
    for text in list(by_text.values()):
        by_text.setdefault(text.rpartition(".")[2].casefold(), text)
    # Somebody may write one format's name in the other's file.
    for flat_name, dotted in FLAT_NAMES.items():
        if dotted in by_text.values():
            by_text.setdefault(flat_name, dotted)
        elif flat_name in by_text:
            by_text.setdefault(dotted, flat_name)
            by_text.setdefault(dotted.rpartition(".")[2], flat_name)
    last = name.rpartition(".")[2].casefold()
    for wanted in (name.casefold(), last):
        near = difflib.get_close_matches(wanted, by_text, n=1, cutoff=0.6)
        if near:
            return f"did you mean {by_text[near[0]]}?"
    return ""
