"""Add and remove roots and remotes in a configuration file, without disturbing what people wrote there.

Guarantees: comments, order and everything else stay as they are; the new text is parsed before it is written
and must mean the old configuration plus the change and nothing else; the file is replaced atomically and
durably, keeping its mode and owner, and through a symbolic link. Concurrent editors wait for each other.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from ciuic.config.flat import set_flat
from ciuic.config.keys import FLAT_NAMES, FLAT_ROOTS_NAME, is_flat
from ciuic.config.load import FLAT_FILE, TABLE, TOML_FILE, find_file, parse_config, read_text, remote_with
from ciuic.config.model import DEFAULT, DEFAULT_REMOTE_NAME, Config, RemoteConfig, RootConfig
from ciuic.config.toml_source import Statement, quote, statements
from ciuic.errors import ConfigError, NotPermitted
from ciuic.system.disk import Disk, open_locked

_NEW_FILE = """\
# Configuration of ciuic. `ciuic config show` prints what is in force, with every default.
"""
_FLAT_SNAPSHOT_DIR = next(flat for flat, name in FLAT_NAMES.items() if name == "repository.path")


def writable_file(file: Path | None = None) -> Path:
    """Return the file that ``protect`` writes: the one in force, else a new TOML file."""
    return find_file(file, searched=(TOML_FILE, FLAT_FILE)) or TOML_FILE


def add_roots(
    file: Path, roots: Sequence[RootConfig], *, repository_path: Path | None = None
) -> list[RootConfig]:
    """Add the ``roots`` that are not there yet, and return them; durable on return.

    Args:
        file: The configuration file; a TOML file is made if missing.
        roots: Roots to protect.
        repository_path: Written where the file names no repository: the default follows the first root, and
            must not move when that root goes.

    Raises:
        ConfigError: the file cannot be edited safely.
        NotPermitted: the file may not be written.
    """
    added: list[RootConfig] = []

    def change(text: str, config: Config) -> tuple[str, Config]:
        """Return the new text and the configuration that it must mean."""
        present = {root.path for root in config.roots}
        # Assigned within, because `_edit_file` calls this under the lock, with the text as it is then.
        added[:] = [root for root in roots if root.path not in present]
        repository = config.repository
        if repository_path is not None and repository.path is None:
            repository = replace(repository, path=repository_path)
            if is_flat(file):
                text = set_flat(text, _FLAT_SNAPSHOT_DIR, str(repository_path))
            else:
                text = _set_toml_repository(text, repository_path)
        if added and is_flat(file):
            text = _add_flat_roots(text, config, added)
        elif added:
            text = _add_toml_roots(text, added)
        return text, replace(config, roots=(*config.roots, *added), repository=repository)

    _edit_file(file, change, create=not is_flat(file))
    return added


def remove_roots(
    file: Path, paths: Sequence[Path], *, only_if: Callable[[], bool] = lambda: True
) -> list[Path]:
    """Remove ``paths`` from the file and return those that were there; durable on return.

    Args:
        file: The configuration file.
        paths: Roots to remove.
        only_if: Asked while no other editor can change anything; nothing is removed where it returns False.
    """
    removed: list[Path] = []

    def change(text: str, config: Config) -> tuple[str, Config]:
        """Return the new text and the configuration that it must mean."""
        gone = {root.path for root in config.roots} & set(paths) if only_if() else set()
        removed[:] = sorted(gone)
        kept = tuple(root for root in config.roots if root.path not in gone)
        if gone and is_flat(file):
            text = set_flat(text, FLAT_ROOTS_NAME, [str(root.path) for root in kept])
        elif gone:
            text = _remove_toml_roots(text, config, gone)
        return text, replace(config, roots=kept)

    _edit_file(file, change, create=False)
    return removed


# --- flat


def _add_flat_roots(text: str, config: Config, added: Sequence[RootConfig]) -> str:
    if any(root.driver != "auto" or root.exclude for root in added):
        raise ConfigError(
            "the flat format has no settings of single roots",
            hint="`ciuic config convert` makes a TOML file of it",
        )
    return set_flat(text, FLAT_ROOTS_NAME, [str(root.path) for root in (*config.roots, *added)])


# --- TOML


def _add_toml_roots(text: str, added: Sequence[RootConfig]) -> str:
    lines = []
    for root in added:
        lines += ["", "[[root]]", f"path = {quote(str(root.path))}"]
        if root.driver != "auto":
            lines.append(f"driver = {quote(root.driver)}")
        if root.exclude:
            lines.append(f"exclude = [{', '.join(map(quote, root.exclude))}]")
    return _with_line_end(text) + "\n".join(lines) + "\n"


def _set_toml_repository(text: str, path: Path) -> str:
    header = next((s for s in statements(text) if s.kind == "table" and s.path == ("repository",)), None)
    if header is None:
        return _with_line_end(text) + f"\n[repository]\npath = {quote(str(path))}\n"
    return _with_key(text, header, "path", str(path))


def _with_key(text: str, header: Statement, key: str, value: str) -> str:
    """Return the text with a key of a table directly behind its header."""
    lines = _with_line_end(text).splitlines(keepends=True)
    lines.insert(header.last_line, f"{key} = {quote(value)}\n")
    return "".join(lines)


def _remove_toml_roots(text: str, config: Config, gone: set[Path]) -> str:
    spans = _root_spans(statements(text))
    if len(spans) != len(config.roots):
        raise ConfigError("the roots are not written as [[root]] tables", hint="edit the file by hand")
    lines = text.splitlines(keepends=True)
    # From the end, so that the line numbers of the tables before stay right.
    for (first_line, last_line), root in reversed(list(zip(spans, config.roots, strict=True))):
        if root.path not in gone:
            continue
        start, end = first_line - 1, last_line
        # One of the blank lines around the table is removed with it.
        if start > 0 and not lines[start - 1].strip() and (end == len(lines) or not lines[end].strip()):
            start -= 1
        del lines[start:end]
    return "".join(lines)


def _root_spans(found: Sequence[Statement]) -> list[tuple[int, int]]:
    """Return first and last line of each [[root]] with its keys, without a comment before the next header."""
    spans: list[tuple[int, int]] = []
    inside = False
    for statement in found:
        if statement.kind == "array" and statement.path[0] == "root" and len(statement.path) == 2:
            spans.append((statement.first_line, statement.last_line))
            inside = True
        elif statement.kind == "value" and inside:
            spans[-1] = (spans[-1][0], statement.last_line)
        else:
            inside = False
    return spans


def _with_line_end(text: str) -> str:
    """Return the text with a line end behind its last line."""
    return text if not text or text.endswith("\n") else text + "\n"


# --- the file


def _edit_file(
    file: Path, change: Callable[[str, Config], tuple[str, Config]], *, create: bool, dry_run: bool = False
) -> None:
    """Change a configuration file; durable on return.

    Args:
        file: The configuration file.
        change: Returns the new text and the configuration that it must mean. It is called under the lock, with
            the text as it is then.
        create: Make a TOML file if there is none.
        dry_run: Raise what the change would raise, and write nothing.

    Raises:
        ConfigError: the file cannot be edited safely.
        NotPermitted: the file may not be written.
    """
    # Through a symbolic link: the file behind it is replaced, and the link stays.
    file = Path(os.path.realpath(file))
    try:
        if create:
            file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        # The lock covers reading as well: of two editors, the second must see what the first has written.
        with locked(file):
            text = _NEW_FILE if create and not file.exists() else read_text(file)
            try:
                new_text, meant = change(text, parse_config(text, file))
            except ValueError as error:
                raise ConfigError(f"{file} cannot be changed: {error}") from None
            # Before anything is written: what cannot be edited safely is left to the operator.
            _check_meaning(new_text, meant, file)
            if new_text != text and not dry_run:
                _replace(file, new_text.encode("utf-8"))
    except PermissionError as error:
        raise NotPermitted(f"{file} may not be changed: {error.strerror}", hint="run as root") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be changed: {error.strerror}") from error


def _check_meaning(text: str, meant: Config, file: Path) -> None:
    try:
        result = parse_config(text, file)
    except ConfigError:
        result = None
    # Positions in the text are exact only for what the scanner understands: a wrong edit is found here.
    if result is None or _meaning(result) != _meaning(meant):
        raise ConfigError(f"{file} is written in a way that cannot be edited safely", hint="edit it by hand")


def _meaning(config: Config) -> Config:
    """Return the configuration without line numbers."""
    roots = tuple(replace(root, origin=DEFAULT) for root in config.roots)
    return replace(config, roots=roots, origins={})


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Exclude other editors of a configuration file, which is no symbolic link. OSError."""
    # Not the file itself, which is replaced by a rename: a lock on the old inode would exclude nobody. Nor its directory: every
    # user may open that one, and so hold the lock for ever.
    lock = file.with_name(f".{file.name}.lock")
    # Made anew where a power cut took it: nothing is in it.
    descriptor = open_locked(lock, wait=True)
    try:
        yield
    finally:
        os.close(descriptor)


def _replace(file: Path, content: bytes) -> None:
    disk = Disk()
    with disk.replacing(file) as descriptor:
        disk.write_at(descriptor, [content], 0)
        _copy_ownership(file, descriptor)


def _copy_ownership(file: Path, descriptor: int) -> None:
    try:
        old = os.stat(file)
    except FileNotFoundError:
        # A configuration has no secrets, and other users' commands read it.
        os.fchmod(descriptor, 0o644)
        return
    if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
        # Owner before mode: chown(2) may clear bits of the mode.
        os.fchown(descriptor, old.st_uid, old.st_gid)
    os.fchmod(descriptor, old.st_mode & 0o7777)


def write_remote(file: Path, remote: RemoteConfig, *, dry_run: bool = False) -> bool:
    """Write the remote into the file, and return True if that changed it; durable on return.

    Of a remote that the file lacks, name, URLs, endpoint, region, ``encryption = false`` and key file are
    written. To one that it has, only a key file is added, where it names neither one nor a command. Nothing
    else is changed.

    Args:
        file: The configuration file; a TOML file is made if missing.
        remote: The remote. Its retention, schedule and prices are not written.
        dry_run: Raise what the change would raise, and write nothing.

    Raises:
        ConfigError: the file cannot be edited safely, or has another remote of this name.
        NotPermitted: the file may not be written.
    """
    if is_flat(file):
        raise ConfigError(
            "the flat format has no remotes", hint="`ciuic config convert` makes a TOML file of it"
        )
    changed = False

    def change(text: str, config: Config) -> tuple[str, Config]:
        nonlocal changed
        present = {one.name: one for one in config.remotes}.get(remote.name)
        if present is None:
            new_text, meant = _with_table(text, config, remote)
        elif present.url != remote.url:
            raise ConfigError(
                f"{file} has another remote with the name {remote.name}: {present.url}",
                hint="choose another name: --name NAME",
            )
        else:
            new_text, meant = _with_key_file(text, config, present, remote.key_file)
        changed = new_text != text
        return new_text, meant

    _edit_file(file, change, create=True, dry_run=dry_run)
    return changed


def _with_table(text: str, config: Config, remote: RemoteConfig) -> tuple[str, Config]:
    headers = _headers(statements(text))
    if any(len(header.path) == 1 for header in headers):
        raise ConfigError(
            f"the file has one remote, as [{TABLE}]; of several each is [[{TABLE}]] with a name",
            hint=f"write [[{TABLE}]] for [{TABLE}], and give that one a name, such as "
            f"{config.remotes[0].name if config.remotes else DEFAULT_REMOTE_NAME!r}",
        )
    several = bool(headers)
    values: dict[str, str | bool] = {}
    if several or remote.name != DEFAULT_REMOTE_NAME:
        values["name"] = remote.name
    values["url"] = remote.url
    for key in ("endpoint", "region", "ssh_command", "ssh_program", "storage_class"):
        if value := getattr(remote, key):
            values[key] = value
    if not remote.encryption:
        values["encryption"] = False
    if remote.key_file is not None:
        values["key_file"] = str(remote.key_file)
    lines = ["", f"[[{TABLE}]]" if several else f"[{TABLE}]"]
    lines += [
        f"{key} = {quote(value) if isinstance(value, str) else str(value).lower()}"
        for key, value in values.items()
    ]
    # As the reader makes it: its retention follows the local one.
    read = remote_with({**values, "key_file": remote.key_file}, config.retention)
    return _with_line_end(text) + "\n".join(lines) + "\n", replace(config, remotes=(*config.remotes, read))


def _with_key_file(
    text: str, config: Config, present: RemoteConfig, key_file: Path | None
) -> tuple[str, Config]:
    if key_file is None or present.key_file is not None or present.key_command:
        return text, config
    index = config.remotes.index(present)
    found = {header.path: header for header in _headers(statements(text))}
    header = found.get((TABLE,)) or found.get((TABLE, index))
    if header is None:
        raise ConfigError(
            f"the remote {present.name} is not written as a table [{TABLE}]",
            hint=f"add the key by hand: key_file = {quote(str(key_file))}",
        )
    remotes = list(config.remotes)
    remotes[index] = replace(present, key_file=key_file)
    return _with_key(text, header, "key_file", str(key_file)), replace(config, remotes=tuple(remotes))


def _headers(found: Sequence[Statement]) -> list[Statement]:
    """Return the headers of remotes: [remote], or each [[remote]]."""
    return [
        one
        for one in found
        if (one.kind == "table" and one.path == (TABLE,))
        or (one.kind == "array" and one.path[0] == TABLE and len(one.path) == 2)
    ]
