"""Load the configuration from files and environment; report everything wrong with file and line.

Guarantees: the result is complete, and valid as far as text can tell; whether the directories it names exist
is checked by ciuic.config.places. Unknown keys are errors. All errors of a file are found in one go: the draft of a
configuration collects values, their origins and every problem, and never stops at one. A remote with an error is left out.
Exactly one file is read: ``--config`` or CIUIC_CONFIG; else ``/etc/ciuic/ciuic.toml``; else the flat
``/etc/ciuric.conf``; else none.

The retention of a remote is at least the local one: a rule of ``[remote.keep]`` that is not set has the larger
of its default and the value in ``[retention]``, so that a remote forgets a snapshot before the host does only
if the operator says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import tomli
from msgspec.structs import replace

from ciuic.config.flat import FlatSetting, flat_to_toml, is_flat, parse_flat
from ciuic.config.keys import (
    CHECKPOINT_KEYS,
    DEFAULT_REMOTE_NAME,
    FLAT_NAMES,
    FLAT_ROOTS_NAME,
    KEYS,
    REMOTE_KEYS,
    ROOT_KEYS,
    SNAPSHOT_WHEN_KEYS,
    TIER_KEYS,
    TRAINER_KEYS,
    WATCH_NUMBER_KEYS,
    Key,
    fields_of,
    with_values,
)
from ciuic.config.model import (
    DEFAULT,
    CheckpointPattern,
    Config,
    Origin,
    Problem,
    RemoteConfig,
    RootConfig,
    SnapshotWhen,
    TierRule,
    TrainerConfig,
    WatchNumber,
)
from ciuic.config.owners import refuse_foreign_file
from ciuic.config.toml_source import TomlPath, line_numbers, line_of, statements
from ciuic.errors import CiuicError, ConfigError, NotPermitted
from ciuic.retention import RetentionPolicy

TABLE = "remote"
TIER = "tier"
_REMOVED_KEYS: Final = {
    "packs_url": "take it out; docs/remote.md says how packs that lie elsewhere get beside the log of the remote"
}
_SECTIONS = tuple(dict.fromkeys(name.partition(".")[0] for name in REMOTE_KEYS if "." in name))
_SHOWN = [f"{TABLE}.{name}" for name in REMOTE_KEYS]
_LEAST = (
    "keep_within_seconds",
    "keep_safety_seconds",
    "keep_last",
    "keep_hourly",
    "keep_daily",
    "keep_weekly",
    "keep_monthly",
    "keep_yearly",
    "keep_emergency",
)


class ReadRemote(NamedTuple):
    """The valid values of one remote, by their names in ``REMOTE_KEYS``."""

    values: dict[str, Any]
    origins: dict[str, Origin]
    origin: Origin
    tiers: tuple[TierRule, ...] = ()

    def config(self, local: RetentionPolicy) -> RemoteConfig:
        """Return the remote, beside a local retention of ``local``."""
        base = RemoteConfig(
            name=DEFAULT_REMOTE_NAME,
            url=self.values["url"],
            tiers=self.tiers,
            origin=self.origin,
            origins=self.origins,
        )
        at_least = {name: max(getattr(local, name), getattr(base.keep, name)) for name in _LEAST}
        keep = replace(base.keep, **at_least, keep_tags=local.keep_tags)
        return with_values(replace(base, keep=keep), REMOTE_KEYS, self.values)


def _read_remotes(value: object, lines: Mapping[TomlPath, int], draft: Draft) -> list[ReadRemote]:
    """Return the remotes of a document without an error; each error goes to ``draft``."""
    if isinstance(value, dict):
        tables: list[tuple[dict[str, object], TomlPath]] = [(value, (TABLE,))]
    elif isinstance(value, list) and all(isinstance(item, dict) for item in value):
        tables = [(table, (TABLE, index)) for index, table in enumerate(value)]
    else:
        draft.complain(
            f"{TABLE} is a table: write [{TABLE}], or [[{TABLE}]] for each of several",
            line_of(lines, (TABLE,)),
        )
        return []
    found: list[ReadRemote] = []
    for table, path in tables:
        line = line_of(lines, path)
        read, is_valid = _read_one(
            {name: item for name, item in table.items() if name != TIER}, path, lines, draft
        )
        if TIER in table:
            rules, are_valid = _read_tiers(table[TIER], (*path, TIER), lines, draft)
            read, is_valid = read._replace(tiers=rules), is_valid and are_valid
        flaws = list(_flaws(table, read.values, [*found], alone=len(tables) == 1))
        for flaw, key in flaws:
            draft.complain(flaw, read.origins[key].line if key in read.origins else line)
        if is_valid and not flaws:
            found.append(read)
    return found


def _read_one(
    table: dict[str, object], path: TomlPath, lines: Mapping[TomlPath, int], draft: Draft
) -> tuple[ReadRemote, bool]:
    """Return the valid values of a table, and whether it had no others."""
    read = ReadRemote({}, {}, draft.at(line_of(lines, path)))
    is_valid = True
    for parts, raw in _flattened(table):
        name, line = ".".join(parts), line_of(lines, (*path, *parts))
        # A key in quotes may have a dot of its own, which makes it none of a table.
        if name not in REMOTE_KEYS or len(parts) != len(name.split(".")):
            is_valid = False
            if name in _SECTIONS:
                draft.complain(f"{TABLE}.{name} is a table: write [{TABLE}.{name}]", line)
            else:
                draft.unknown(f"{TABLE}.{name}", _SHOWN, line)
            continue
        try:
            read.values[name] = REMOTE_KEYS[name].parse(raw)
            read.origins[name] = draft.at(line)
        except ValueError as error:
            is_valid = False
            draft.complain(f"{TABLE}.{name}: {error}", line)
    return read, is_valid


def _read_tiers(
    value: object, path: TomlPath, lines: Mapping[TomlPath, int], draft: Draft
) -> tuple[tuple[TierRule, ...], bool]:
    """Return the valid rules of ``[[remote.tier]]``, and whether there were no others."""
    where = f"{TABLE}.{TIER}"
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        draft.complain(f"{where} is a list of tables: write [[{where}]] for each", line_of(lines, path))
        return (), False
    rules: list[TierRule] = []
    for index, table in enumerate(value):
        line = line_of(lines, (*path, index))
        values = draft.read_one(where, TIER_KEYS, table, (*path, index), lines)
        missing = [name for name in ("after", "storage_class") if name not in table]
        for name in missing:
            draft.complain(f"a [[{where}]] without {name}", line)
        if len(values) == len(table) and not missing:
            rules.append(TierRule(**fields_of(TIER_KEYS, values)))
    return tuple(rules), len(rules) == len(value)


def _flattened(table: dict[str, object]) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield each key, behind the name of the table in it that has the key, and its value."""
    for name, value in table.items():
        if name in _SECTIONS and isinstance(value, dict):
            for inner, item in value.items():
                yield (name, inner), item
        else:
            yield (name,), value


def _flaws(
    table: dict[str, object], values: dict[str, Any], before: list[ReadRemote], *, alone: bool
) -> Iterator[tuple[str, str]]:
    """Yield what is missing in a table or contradicts another key, and the key that it is about."""
    if "url" not in table:
        yield f"a [{TABLE}] without a url", ""
    if "name" not in table and not alone:
        yield f"a [[{TABLE}]] without a name: of several, each needs one", ""
    if any(read.values.get("name") == values["name"] for read in before if "name" in values):
        yield f"a second [[{TABLE}]] with the name {values['name']}", "name"
    # Two uploaders of one repository to one place would do everything twice.
    if any(read.values["url"] == values["url"] for read in before if "url" in values):
        yield f"a second [[{TABLE}]] with the url {values['url']}", "url"
    if values.get("key_file") and values.get("key_command"):
        yield f"{TABLE}.key_file and {TABLE}.key_command must not be set together", "key_command"
    for key in ("key_file", "key_command"):
        if values.get("encryption") is False and values.get(key):
            yield f"{TABLE}.{key} has no use without encryption", key
    scheme = values.get("url", "").partition(":")[0]
    for key in ("endpoint", "region", "storage_class"):
        if scheme in ("file", "ssh") and values.get(key):
            yield f"{TABLE}.{key} has no use for a directory ({values['url']})", key
    for key in ("ssh_command", "ssh_program"):
        if scheme != "ssh" and values.get(key):
            yield f"{TABLE}.{key} has no use for {scheme}://", key
    if scheme in ("file", "ssh", "gs", "oss") and table.get(TIER):
        yield (
            f"{TABLE}.{TIER} has no use for {scheme}://, whose storage classes are not changed from here",
            "url",
        )
    if scheme == "oss" and not values.get("endpoint") and not values.get("region"):
        yield f'{TABLE}.region must be set for oss://, such as "cn-hangzhou", or {TABLE}.endpoint', "url"


def raise_for(problems: Iterable[Problem]) -> None:
    """Raise the errors among ``problems`` as one, with the exit code of the first; do nothing for none."""
    errors = [problem for problem in problems if problem.severity == "error"]
    if len(errors) == 1:
        raise errors[0].error(str(errors[0]), hint=errors[0].hint)
    if errors:
        lines = (f"{problem} ({problem.hint})" if problem.hint else str(problem) for problem in errors)
        raise errors[0].error("\n".join(lines))


class Draft:
    """Configuration under construction: values so far, their origins, and the problems found."""

    # No dataclass: the module alone takes 3 ms of processor time, of each command that reads the configuration.
    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.values: dict[str, Any] = {}
        self.origins: dict[str, Origin] = {}
        self.roots: list[RootConfig] = []
        self.trainers: list[TrainerConfig] = []
        self.snapshot_when: list[SnapshotWhen] = []
        self.watch_numbers: list[WatchNumber] = []
        self.checkpoints: list[CheckpointPattern] = []
        self.remotes: list[ReadRemote] = []
        self.problems: list[Problem] = []

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
            elif name == TABLE:
                self.remotes = _read_remotes(value, lines, self)
            elif name in KEYS:
                self.put(KEYS[name], value, self.at(line))
            else:
                self.unknown(name, [*KEYS, *_TABLES, *_LISTS, TABLE], line)

    def read_table(self, table: str, value: object, lines: Mapping[TomlPath, int]) -> None:
        """Read the keys of one table."""
        if not isinstance(value, dict):
            self.complain(f"{table} is a table: write [{table}]", line_of(lines, (table,)))
            return
        for name, item in value.items():
            dotted, line = f"{table}.{name}", line_of(lines, (table, name))
            if dotted in KEYS:
                self.put(KEYS[dotted], item, self.at(line))
            elif name in KEYS or name in (*_LISTS, TABLE):
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
            values = self.read_one(kind, _LISTS[kind], table, path, lines)
            add = getattr(self, f"add_{kind}")
            add(table, values, line_of(lines, path))

    def read_one(
        self,
        kind: str,
        known: Mapping[str, Key],
        table: dict[str, object],
        path: TomlPath,
        lines: Mapping[TomlPath, int],
    ) -> dict[str, Any]:
        """Return the valid values of one table of a list; record an error for each other."""
        values: dict[str, Any] = {}
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
            self.roots.append(RootConfig(**fields_of(ROOT_KEYS, values), origin=self.at(line)))
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
            self.trainers.append(TrainerConfig(**fields_of(TRAINER_KEYS, values), origin=self.at(line)))

    def add_watch_number(self, table: dict[str, object], values: dict[str, Any], line: int) -> None:
        """Add a number whose keys have been read."""
        if "file" not in table:
            self.complain("a [[watch_number]] without a file", line)
        elif len(self.watch_numbers) >= MAX_RULES:
            self.complain(f"more than {MAX_RULES} [[watch_number]]", line)
        # Otherwise an error has been recorded for the invalid value.
        elif len(values) == len(table):
            number = WatchNumber(str(values["file"]), values.get("key", "loss"), self.at(line))
            self.watch_numbers.append(number)

    def add_checkpoints(self, table: dict[str, object], values: dict[str, Any], line: int) -> None:
        """Add a pattern whose key has been read."""
        if "path" not in table:
            self.complain("a [[checkpoints]] without a path", line)
        elif len(self.checkpoints) >= MAX_RULES:
            self.complain(f"more than {MAX_RULES} [[checkpoints]]", line)
        # Otherwise an error has been recorded for the invalid value.
        elif len(values) == len(table):
            self.checkpoints.append(CheckpointPattern(values["path"], self.at(line)))

    def add_snapshot_when(self, table: dict[str, object], values: dict[str, Any], line: int) -> None:
        """Add a rule whose keys have been read."""
        names = [name for name in ("renamed", "appears", "closed") if name in table]
        sizes = [name for name in ("after", "changes") if name in table]
        if len(sizes) == 1:
            self.complain("after and changes must be set together", line)
        elif len(names) + bool(sizes) != 1:
            self.complain(
                "a [[snapshot_when]] needs one of renamed, appears, closed, or after and changes", line
            )
        elif len(self.snapshot_when) >= MAX_RULES:
            self.complain(f"more than {MAX_RULES} [[snapshot_when]]", line)
        # Otherwise an error has been recorded for the invalid value.
        elif len(values) == len(table):
            rule = SnapshotWhen(**fields_of(SNAPSHOT_WHEN_KEYS, values), origin=self.at(line))
            self.snapshot_when.append(rule)

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
            elif name.partition(".")[0] == TABLE:
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
        hint = (
            _REMOVED_KEYS.get(name) or _suggestion(name, known) or "`ciuic config example` prints every key"
        )
        self.complain(f"unknown key {shown or name}", line, hint)

    def build(self) -> Config:
        """Return the configuration, with defaults for everything not set."""
        base = Config(
            roots=tuple(self.roots),
            trainers=tuple(self.trainers),
            snapshot_when=tuple(self.snapshot_when),
            watch_numbers=tuple(self.watch_numbers),
            checkpoints=tuple(self.checkpoints),
            file=self.file,
            origins={name: self.origins.get(name, DEFAULT) for name in KEYS},
        )
        config = with_values(base, KEYS, self.values)
        if "control.socket" not in self.values:
            control = replace(config.control, socket=config.runtime_dir / "control.sock")
            config = replace(config, control=control)
        return replace(config, remotes=tuple(read.config(config.retention) for read in self.remotes))


_LISTS: Mapping[str, Mapping[str, Key]] = {
    "root": ROOT_KEYS,
    "trainer": TRAINER_KEYS,
    "snapshot_when": SNAPSHOT_WHEN_KEYS,
    "watch_number": WATCH_NUMBER_KEYS,
    "checkpoints": CHECKPOINT_KEYS,
}
MAX_RULES: Final = 64
"""Limit of ``[[snapshot_when]]``: a worker compares each changed name with all of them."""
_TABLES = tuple(dict.fromkeys(name.partition(".")[0] for name in KEYS if "." in name))


def _suggestion(name: str, known: Iterable[str]) -> str:
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
    # Only where a name is wrong: each command that reads a configuration would pay for it.
    from difflib import get_close_matches

    section, _, last = name.casefold().rpartition(".")
    # A known section is in all of its keys: compared as a whole, every short key of it would be near.
    is_known_section = bool(section) and any(text.startswith(f"{section}.") for text in by_text)
    for wanted in (last,) if is_known_section else (name.casefold(), last):
        near = get_close_matches(wanted, by_text, n=1, cutoff=0.6)
        if near:
            return f"did you mean {by_text[near[0]]}?"
    return ""


TOML_FILE = Path("/etc/ciuic/ciuic.toml")
FLAT_FILE = Path("/etc/ciuric.conf")
CONFIG_VARIABLE = "CIUIC_CONFIG"
REPOSITORY_VARIABLE = "CIUIC_REPO"
MAX_SYNTAX_ERRORS = 20
"""Limit for `_without_syntax_errors`: a file with more broken lines was not meant to be a configuration, and
each costs a parse of the whole."""


def load_config(
    file: Path | None = None,
    *,
    repository: Path | None = None,
    trust_repository: bool = False,
    environ: Mapping[str, str] | None = None,
    searched: Iterable[Path] = (TOML_FILE, FLAT_FILE),
) -> Config:
    """Return the effective configuration.

    Args:
        file: Value of --config.
        repository: Value of --repo.
        trust_repository: Value of --trust-repository.
        environ: Environment; None for that of the process.
        searched: Files to look for when none is named.

    Raises:
        ConfigError: lists every mistake; also if this process is root and others may write the file.
        NotPermitted: the file may not be read.
    """
    environ = os.environ if environ is None else environ
    path = find_file(file, environ=environ, searched=searched)
    draft = Draft(path)
    if path is not None:
        # Before the file is read: it decides which programs root runs.
        refuse_foreign_file(path)
        draft.read(read_text(path))
    # An option wins over the environment, which wins over the file.
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
    """Return the file in force: a named one, else the first of the usual places that exists, else None."""
    environ = os.environ if environ is None else environ
    if file is None and environ.get(CONFIG_VARIABLE):
        file = Path(environ[CONFIG_VARIABLE])
    if file is not None:
        return file
    # lexists: a dangling link is a file that cannot be read, not a missing one whose defaults would be used.
    return next((path for path in searched if os.path.lexists(path)), None)


def parse_config(text: str, file: Path) -> Config:
    """Return the configuration that ``text`` means. ConfigError lists every mistake."""
    draft = Draft(file)
    draft.read(text)
    return draft.finish()


def parse_leniently(file: Path | None) -> Config:
    """Return the configuration of a file, with defaults for everything that is invalid or unreadable."""
    draft = Draft(file)
    if file is not None:
        with suppress(CiuicError):
            text = read_text(file)
            draft.read(text if is_flat(file) else _without_syntax_errors(text))
    return draft.build()


def _without_syntax_errors(text: str) -> str:
    """Return TOML text with each line at which parsing fails emptied; empty if too many lines fail."""
    lines = text.splitlines()
    for _ in range(MAX_SYNTAX_ERRORS):
        try:
            tomli.loads("\n".join(lines))
        except tomli.TOMLDecodeError as error:
            if lines:
                # Emptied, not removed, so that the line numbers of the rest stay right.
                lines[min(error.lineno, len(lines)) - 1] = ""
        except RecursionError:
            break
        else:
            return "\n".join(lines)
    return ""


def check_text(text: str, file: Path) -> tuple[Config | None, list[Problem]]:
    """Return every problem of ``text``, and the configuration when none of them is an error."""
    draft = Draft(file)
    draft.read(text)
    return (None if draft.problems else draft.build()), draft.problems


def convert_flat(text: str, file: Path) -> str:
    """Return the TOML text that means what the flat ``text`` does. ConfigError if it is invalid."""
    draft = Draft(file)
    settings = draft.read_flat(text)
    draft.finish()
    return flat_to_toml(settings)


def read_text(path: Path) -> str:
    """Return the text of a configuration file. ConfigError or NotPermitted if it cannot be read."""
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"there is no configuration file {path}",
            hint="ciuic protect PATH writes one; ciuic config example prints one to begin with",
        ) from None
    except PermissionError:
        raise NotPermitted(
            f"no permission to read {path}", hint="run as root, or name another file with --config"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} must be UTF-8, but byte {error.start} is not") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def readable_part(file: Path | None = None) -> Config:
    """Return the configuration with the default for every invalid value.

    A file that others may write is ignored, and so is one that cannot be read.

    Args:
        file: Value of --config.
    """
    path = find_file(file)
    try:
        if path is not None:
            refuse_foreign_file(path)
    # Another user could otherwise send root's command to a socket of that user.
    except CiuicError:
        path = None
    return parse_leniently(path)
