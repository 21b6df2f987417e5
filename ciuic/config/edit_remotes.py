"""Write a remote into a configuration file, with the guarantees of `ciuic.config.edit`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from ciuic.config.edit import edit_file, with_line_end
from ciuic.config.flat import is_flat
from ciuic.config.keys import DEFAULT_REMOTE_NAME
from ciuic.config.model import DEFAULT, Config, RemoteConfig
from ciuic.config.remotes import TABLE, ReadRemote
from ciuic.config.toml_source import Statement, quote, statements
from ciuic.errors import ConfigError


def write_remote(file: Path, remote: RemoteConfig, *, dry_run: bool = False) -> bool:
    """Write the remote into the file, and return True if that changed it; durable on return.

    Of a remote that the file lacks, name, URL, endpoint, region, ``encryption = false`` and key file are
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

    edit_file(file, change, create=True, dry_run=dry_run)
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
    for key in ("endpoint", "region", "storage_class"):
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
    read = ReadRemote({**values, "key_file": remote.key_file}, {}, DEFAULT).config(config.retention)
    return with_line_end(text) + "\n".join(lines) + "\n", replace(config, remotes=(*config.remotes, read))


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
    lines = with_line_end(text).splitlines(keepends=True)
    lines.insert(header.last_line, f"key_file = {quote(str(key_file))}\n")
    remotes = list(config.remotes)
    remotes[index] = replace(present, key_file=key_file)
    return "".join(lines), replace(config, remotes=tuple(remotes))


def _headers(found: Sequence[Statement]) -> list[Statement]:
    """Return the headers of remotes: [remote], or each [[remote]]."""
    return [
        one
        for one in found
        if (one.kind == "table" and one.path == (TABLE,))
        or (one.kind == "array" and one.path[0] == TABLE and len(one.path) == 2)
    ]
