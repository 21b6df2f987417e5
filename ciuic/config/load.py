"""Load the configuration from files and environment; report everything wrong with file and line.

Guarantees: the result is complete, and valid as far as text can tell; whether the directories it names exist
is checked by ciuic.config.places. Unknown keys are errors. All errors of a file are found in one go. Exactly
one file is read: ``--config`` or CIUIC_CONFIG; else ``/etc/ciuic/ciuic.toml``; else the flat
``/etc/ciuric.conf``; else none.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import tomli

from ciuic.config.draft import Draft
from ciuic.config.flat import flat_to_toml, is_flat
from ciuic.config.model import Config, Origin, Problem
from ciuic.config.owners import refuse_foreign_file
from ciuic.errors import CiuicError, ConfigError, NotPermitted

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
