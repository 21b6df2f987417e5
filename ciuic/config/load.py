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
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from ciuic.config.keys import FLAT_NAMES, FLAT_ROOTS_NAME, REMOTE, TOP, Table, is_flat
from ciuic.config.model import DEFAULT, Config, Origin, Problem, RemoteConfig
from ciuic.errors import CiuicError, ConfigError, NotPermitted
from ciuic.retention import RetentionPolicy

# What reads a file is imported where there is one, in its format: commands with --repo do without (3 ms).
if TYPE_CHECKING:
    from ciuic.config.flat import FlatSetting
    from ciuic.config.toml_source import TomlPath

TABLE = "remote"
TIER = "tier"
MAX_RULES: Final = 64
"""Limit of ``[[snapshot_when]]``: a worker compares each changed name with all of them."""
_LIMITED: Final = ("snapshot_when", "watch_number", "checkpoints")
_MAX_FILE_BYTES: Final = 16 << 20
_PIPE_SECONDS: Final = 5.0
"""Longest wait for what comes through a pipe, as from `--config <(sed … ciuic.toml)`."""
_REMOVED_KEYS: Final = {
    "remote.packs_url": "take it out; docs/remote.md says how packs that lie elsewhere get beside the log of the remote"
}
_LEAST: Final = tuple(name for name in RetentionPolicy.__struct_fields__ if name != "keep_tags")
"""Rules of which a larger number keeps more."""


class Reading:
    """Valid values of one table of a file, by their names in its keys, and the tables of the lists in it."""

    # No dataclass: the module alone takes 3 ms of processor time, of each command that reads the configuration.
    def __init__(self, table: Table, origin: Origin = DEFAULT) -> None:
        self.table = table
        self.origin = origin
        self.values: dict[str, Any] = {}
        self.origins: dict[str, Origin] = {}
        self.lists: dict[str, list[Reading]] = {name: [] for name in table.lists}

    def make(self, **base: object) -> Any:
        """Return the struct of the table; ``base`` has values of fields that the file does not set."""
        known = self.table.struct.__struct_fields__
        base |= {key.field: self.values[key.name] for key in self.table.required}
        base |= {field: getattr(self, field) for field in ("origin", "origins") if field in known}
        for name, (field, _) in self.table.lists.items():
            base[field] = tuple(one.make() for one in self.lists[name])
        return self.table.with_values(self.table.struct(**base), self.values)


def remote_of(read: Reading, local: RetentionPolicy) -> RemoteConfig:
    """Return a remote, beside a local retention of ``local``."""
    default = RemoteConfig(url="").keep
    at_least = {name: max(getattr(local, name), getattr(default, name)) for name in _LEAST}
    remote: RemoteConfig = read.make(keep=replace(default, **at_least, keep_tags=local.keep_tags))
    return remote


def remote_with(values: Mapping[str, Any], local: RetentionPolicy) -> RemoteConfig:
    """Return a remote of these values, by their keys, as if a file had them."""
    read = Reading(REMOTE)
    read.values.update(values)
    return remote_of(read, local)


_Flaw = tuple[str, str]
"""Message, and the key that it is about; no key for the table as a whole."""


def _flaws_of_trainer(read: Reading, table: Mapping[str, object], before: list[Reading]) -> Iterator[_Flaw]:
    if any(other.values["name"] == read.values.get("name") for other in before):
        yield f"a second [[trainer]] with the name {read.values['name']}", ""
    elif ("heartbeat_file" in table) != ("heartbeat" in table):
        yield "heartbeat_file and heartbeat must be set together", ""
    elif "pid_file" not in table and "heartbeat_file" not in table:
        yield "a [[trainer]] needs a pid_file, or a heartbeat_file and heartbeat", ""


def _flaws_of_rule(read: Reading, table: Mapping[str, object], before: list[Reading]) -> Iterator[_Flaw]:
    names = [name for name in ("renamed", "appears", "closed") if name in table]
    sizes = [name for name in ("after", "changes") if name in table]
    if len(sizes) == 1:
        yield "after and changes must be set together", ""
    elif len(names) + bool(sizes) != 1:
        yield "a [[snapshot_when]] needs one of renamed, appears, closed, or after and changes", ""


def _flaws_of_remote(read: Reading, table: Mapping[str, object], before: list[Reading]) -> Iterator[_Flaw]:
    """Yield what contradicts another key or remote."""
    values = read.values
    # Two uploaders of one repository to one place would do everything twice.
    for key in ("name", "url"):
        if any(other.values.get(key) == values[key] for other in before if key in values):
            yield f"a second [[{TABLE}]] with the {key} {values[key]}", key
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


_FLAWS: Mapping[str, Callable[[Reading, Mapping[str, object], list[Reading]], Iterator[_Flaw]]] = {
    "trainer": _flaws_of_trainer,
    "snapshot_when": _flaws_of_rule,
    TABLE: _flaws_of_remote,
}


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

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.top = Reading(TOP)
        self.problems: list[Problem] = []
        self._line_of: Callable[[TomlPath], int] = lambda path: 0

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

    def put(self, read: Reading, name: str, raw: object, line: int, shown_name: str) -> None:
        """Parse and store the value of a key; record an error if it is invalid."""
        try:
            read.values[name] = read.table.keys[name].parse(raw)
        except ValueError as error:
            self.complain(f"{shown_name}: {error}", line)
        else:
            read.origins[name] = self.at(line)

    def put_given(self, name: str, value: object, origin: Origin) -> None:
        """Store a value given on the command line or in the environment."""
        # Relative to the working directory, where it was typed; it need not be UTF-8.
        self.top.values[name] = Path(os.path.abspath(value)) if isinstance(value, Path) else value
        self.top.origins[name] = origin

    # --- TOML

    def read_toml(self, text: str) -> None:
        """Read a TOML text."""
        import tomli

        from ciuic.config.toml_source import line_numbers, line_of, statements

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
        self._line_of = partial(line_of, line_numbers(statements(text)))
        self.read_table(self.top, document, (), "")

    def read_table(
        self, read: Reading, items: Mapping[str, object], path: TomlPath, place: str, section: str = ""
    ) -> None:
        """Read the keys of one table; record an error for each that is invalid.

        Args:
            read: Where the values go.
            items: Keys and values as tomli has them.
            path: Path of the table in the file.
            place: Name of the list that the table of ``read`` belongs to, with a dot at its end; empty for the top.
            section: Name of the table within that of ``read``, with a dot at its end.
        """
        table = read.table
        for key, item in items.items():
            name, at = section + key, (*path, key)
            line = self._line_of(at)
            if name in table.lists and not section:
                self.read_tables(read, name, item, at, place + name)
            # A key in quotes may have a dot of its own, which makes it none of a table; at the top it is taken for the key.
            elif name in table.keys and (not place or "." not in key):
                self.put(read, name, item, line, place + name)
            elif name in table.sections and isinstance(item, dict):
                self.read_table(read, item, at, place, f"{name}.")
            elif name in table.sections:
                self.complain(f"{place}{name} is a table: write [{place}{name}]", line)
            elif section and not place and (key in table.keys or key in table.lists):
                # The most frequent mistake with TOML: a top-level key written after a table's header belongs
                # to that table.
                hint = f"{key} belongs to no table: move it above the first [table]"
                self.complain(f"unknown key {name}", line, hint)
            else:
                known = table.keys if section else (*table.keys, *table.sections, *table.lists)
                self.unknown(place + name, [place + one for one in known], line)

    def read_tables(self, read: Reading, name: str, value: object, path: TomlPath, place: str) -> None:
        """Read a list of tables, such as [[root]]."""
        single = place == TABLE and isinstance(value, dict)
        tables = [value] if single else value
        if not isinstance(tables, list) or not all(isinstance(item, dict) for item in tables):
            kind = f"table: write [{place}], or" if place == TABLE else "list of tables: write"
            of = " of several" if place == TABLE else ""
            self.complain(f"{place} is a {kind} [[{place}]] for each{of}", self._line_of(path))
            return
        for index, table in enumerate(tables):
            at = path if single else (*path, index)
            one = Reading(read.table.lists[name][1], self.at(self._line_of(at)))
            errors = len(self.problems)
            self.read_table(one, table, at, f"{place}.")
            for flaw, key in self.flaws(one, table, read.lists[name], place, alone=len(tables) == 1):
                self.complain(flaw, one.origins.get(key, one.origin).line)
            # Of a root with an error in another key it is still known that it is one.
            if len(self.problems) == errors or (place == "root" and "path" in one.values):
                read.lists[name].append(one)

    def flaws(
        self, read: Reading, table: Mapping[str, object], before: list[Reading], place: str, *, alone: bool
    ) -> Iterator[_Flaw]:
        """Yield what is missing in a table of a list, too much, or contradicts another key."""
        header = f"[{place}]" if place == TABLE and alone else f"[[{place}]]"
        missing = [key.name for key in read.table.required if key.name not in table]
        yield from ((f"a {header} without the key {name}", "") for name in missing)
        if place == TABLE and not alone and "name" not in table:
            yield f"a {header} without a name: of several, each needs one", ""
        if place in _LIMITED and len(before) >= MAX_RULES:
            yield f"more than {MAX_RULES} {header}", ""
        elif place in _FLAWS:
            yield from _FLAWS[place](read, table, before)

    # --- the flat format

    def read_flat(self, text: str) -> list[FlatSetting]:
        """Read a text in the flat format and return its settings."""
        from ciuic.config.flat import parse_flat

        settings, errors = parse_flat(text)
        for error in errors:
            self.complain(str(error), error.line)
        for name, value, line in settings:
            if name == FLAT_ROOTS_NAME:
                self.read_flat_roots(value, line)
            elif name in FLAT_NAMES:
                self.put(self.top, FLAT_NAMES[name], value, line, name)
            elif name.partition(".")[0] == TABLE:
                hint = "`ciuic config convert` makes a TOML file of this one"
                self.complain(f"the flat format has no remotes, got {name}", line, hint)
            else:
                self.unknown(name, [*FLAT_NAMES, FLAT_ROOTS_NAME], line)
        return settings

    def read_flat_roots(self, paths: str | list[str], line: int) -> None:
        """Add the roots of the flat format's list."""
        for path in paths:
            one = Reading(TOP.lists["root"][1], self.at(line))
            self.put(one, "path", path, line, FLAT_ROOTS_NAME)
            if one.values:
                self.top.lists["root"].append(one)

    # --- all

    def unknown(self, name: str, known: Iterable[str], line: int) -> None:
        """Record an unknown key, with the key that was probably meant."""
        hint = (
            _REMOVED_KEYS.get(name) or _suggestion(name, known) or "`ciuic config example` prints every key"
        )
        self.complain(f"unknown key {name}", line, hint)

    def build(self) -> Config:
        """Return the configuration, with defaults for everything not set."""
        config: Config = self.top.make(file=self.file)
        if "control.socket" not in self.top.values:
            control = replace(config.control, socket=config.runtime_dir / "control.sock")
            config = replace(config, control=control)
        remotes = tuple(remote_of(read, config.retention) for read in self.top.lists[TABLE])
        return replace(config, remotes=remotes)


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
        from ciuic.config.owners import refuse_foreign_file

        # Before the file is read: it decides which programs root runs.
        refuse_foreign_file(path)
        draft.read(read_text(path))
    # An option wins over the environment, which wins over the file.
    if repository is not None:
        draft.put_given("repository.path", repository, Origin("option", "--repo"))
    elif environ.get(REPOSITORY_VARIABLE):
        variable = Origin("environment", REPOSITORY_VARIABLE)
        draft.put_given("repository.path", Path(environ[REPOSITORY_VARIABLE]), variable)
    if trust_repository:
        draft.put_given("repository.trust_owner", True, Origin("option", "--trust-repository"))
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
    import tomli

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
    from ciuic.config.flat import flat_to_toml

    draft = Draft(file)
    settings = draft.read_flat(text)
    draft.finish()
    return flat_to_toml(settings)


def read_text(path: Path) -> str:
    """Return the text of a configuration file. ConfigError or NotPermitted if it cannot be read."""
    try:
        return _read_bytes(path).decode("utf-8")
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


def _read_bytes(path: Path) -> bytes:
    """Return the content of a file, or what comes through a pipe; no pipe without a writer, and no endless device, holds us up.

    Raises:
        ConfigError: nothing comes, or too much.
        OSError: it cannot be read.
    """
    # O_NONBLOCK: opening a pipe does not wait for its other end.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY), "rb", buffering=0) as file:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            found = file.read(_MAX_FILE_BYTES + 1)
        else:
            from ciuic.system.poll import readable

            found = b""
            while len(found) <= _MAX_FILE_BYTES:
                # Of the end of a pipe poll(2) says nothing where the last writer had gone before it was opened here.
                piece = file.read(1 << 20) if readable(file.fileno(), _PIPE_SECONDS) or found else None
                if piece is None:
                    raise ConfigError(
                        f"{path} is no regular file, and nothing has come from it in {_PIPE_SECONDS:g} s"
                    )
                if not piece:
                    break
                found += piece
    if len(found) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path} must have at most {_MAX_FILE_BYTES >> 20} MiB, but is larger")
    return found


def readable_part(file: Path | None = None) -> Config:
    """Return the configuration with the default for every invalid value.

    A file that others may write is ignored, and so is one that cannot be read.

    Args:
        file: Value of --config.
    """
    path = find_file(file)
    try:
        if path is not None:
            from ciuic.config.owners import refuse_foreign_file

            refuse_foreign_file(path)
    # Another user could otherwise send root's command to a socket of that user.
    except CiuicError:
        path = None
    return parse_leniently(path)
