"""Secrets of a remote from where a process without a terminal finds them: environment, key file, key command."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from ciuic.config import RemoteConfig
from ciuic.remote.sealing.slot_secret import (
    SlotSecret,
    passphrase_secret,
    read_key_file,
    recovery_secret,
    run_key_command,
)

PASSPHRASE_VARIABLE: Final = "CIUIC_REMOTE_PASSPHRASE"
KEY_FILE_VARIABLE: Final = "CIUIC_REMOTE_KEY_FILE"
RECOVERY_VARIABLE: Final = "CIUIC_REMOTE_RECOVERY_KEY"
_SLOT_VARIABLE: Final = "CIUIC_REMOTE_SLOT"
# systemd.exec(5): files that a unit got by LoadCredential=.
_CREDENTIALS_VARIABLE: Final = "CREDENTIALS_DIRECTORY"


def configured_secrets(
    config: RemoteConfig | None, environ: Mapping[str, str] | None = None
) -> list[SlotSecret]:
    """Return the secrets that are configured, those of the environment first; none for none.

    The credential of the unit (``ciuic.remote-key.<name>``, else ``ciuic.remote-key``) goes before ``key_file``.

    Args:
        config: The remote's part of the configuration; None where there is none.
        environ: Environment; None for that of the process.

    Raises:
        UsageError, NotFound, NotPermitted: a secret that is named cannot be had.
    """
    variables = os.environ if environ is None else environ
    found = []
    if passphrase := variables.get(PASSPHRASE_VARIABLE):
        found.append(passphrase_secret(passphrase))
    if recovery := variables.get(RECOVERY_VARIABLE):
        found.append(recovery_secret(recovery))
    if path := variables.get(KEY_FILE_VARIABLE):
        found.append(read_key_file(path))
    if config is None:
        return found
    credential = _credential(config.name, variables.get(_CREDENTIALS_VARIABLE, ""))
    if credential:
        found.append(read_key_file(credential))
    elif config.key_file is not None:
        found.append(read_key_file(str(config.key_file)))
    if config.key_command:
        found.append(run_key_command(config.key_command))
    return found


def first_slot(environ: Mapping[str, str] | None = None) -> str:
    """Return the key slot that is to be tried first; an empty text for none."""
    return (os.environ if environ is None else environ).get(_SLOT_VARIABLE, "")


def _credential(name: str, directory: str) -> str:
    """Return the path of the credential for this remote, or an empty text."""
    paths = (f"{directory}/ciuic.remote-key.{name}", f"{directory}/ciuic.remote-key")
    return next((path for path in paths if directory and os.path.exists(path)), "")
