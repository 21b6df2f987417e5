"""``ciuic remote init``: makes a remote.

Guarantees: a remote is made only in a bucket that has proved create-only, and never over another one; the key of
this host is durable before the remote exists; the recovery key is printed once and stored nowhere.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from ciuic.cli.commands.remote import targets
from ciuic.cli.shared.messages import warn
from ciuic.cli.shared.names import shown_text
from ciuic.cli.shared.options import FrameCommand
from ciuic.cli.shared.output import json_option, note, out, out_json
from ciuic.cli.shared.session import current
from ciuic.errors import CiuicError, UsageError

if TYPE_CHECKING:
    from ciuic.config import RemoteConfig
    from ciuic.remote.access import Remote
    from ciuic.remote.objects.model import Objects
    from ciuic.remote.objects.prove import Proof
    from ciuic.remote.sealing.key_slots import SlotSecret

_LOST_KEY = (
    "KEEP THIS RECOVERY KEY SOMEWHERE ELSE THAN ON THIS HOST. IT IS SHOWN ONLY NOW. A LOST KEY IS LOST DATA: "
    "WITHOUT ANY KEY NOBODY CAN READ WHAT IS IN THE REMOTE."
)
_HOST_SLOT = "host"
RECOVERY_SLOT = "recovery"
PASSPHRASE_SLOT = "passphrase"


@click.command("init", cls=FrameCommand)
@targets.place_options
@click.option(
    "--key-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where the key of this host is written; default: remote-NAME.key beside the configuration file.",
)
@click.option(
    "--passphrase",
    is_flag=True,
    help="Have a passphrase open the remote as well (CIUIC_REMOTE_PASSPHRASE, or asked for).",
)
@click.option("--no-encryption", is_flag=True, help="Store everything in clear.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
def init(
    place: str,
    name: str,
    endpoint: str,
    region: str,
    key_file: Path | None,
    passphrase: bool,
    no_encryption: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Make a remote at URL, or at the one that is configured, and have this host use it.

    The bucket must exist and be empty below the prefix; it is tested first. Everything is encrypted, with a key file for this
    host and a recovery key that is printed once.
    """
    from ciuic.cli.commands.remote import adoption
    from ciuic.remote.access import configured_objects

    session = current()
    config = targets.find_remote(session.config, place, name=name, endpoint=endpoint, region=region)
    sealed = _is_sealed(config, config in session.config.remotes, no_encryption)
    if not sealed and (passphrase or key_file):
        raise UsageError(
            "a remote without encryption has no keys", hint="leave --passphrase and --key-file out"
        )
    # Everything that can be refused is refused before anything is made.
    file = adoption.require_writable_config(session)
    path = adoption.key_file_path(session, config, key_file)
    if sealed and not config.key_command:
        _refuse_existing(config, path)
    will_be = _with_key_file(config, path) if sealed else config
    adoption.require_adoptable(session, replace(will_be, encryption=sealed), file)
    extra = targets.new_passphrase() if passphrase else None
    if not sealed and not yes:
        _ask(config.url)
    objects = configured_objects(config, make=True)
    try:
        _refuse_remote(objects)
        proof = _prove(config)
        is_new = sealed and not config.key_command and not path.exists()
        secret = adoption.host_secret(config, path) if sealed else None
        remote = _make(objects, session.config.repository.block_size_bytes, sealed, path if is_new else None)
        recovery = _add_slots(remote, secret, extra) if secret is not None else ""
        if not as_json:
            _say(config, remote, proof, path if secret and not config.key_command else None, recovery)
        config = will_be
        adopted = adoption.adopt(session, config, remote, file)
    finally:
        objects.close()
    if as_json:
        out_json({**_document(config, remote, proof, recovery), **adopted.document()})
    else:
        adoption.say(adopted)


def _is_sealed(config: RemoteConfig, configured: bool, no_encryption: bool) -> bool:
    if configured and no_encryption and config.encryption:
        raise UsageError(
            f"the configuration does not say that the remote {config.name} is in clear",
            hint="write encryption = false under [remote]",
        )
    if configured and not no_encryption and not config.encryption:
        raise UsageError(
            f"the configuration says encryption = false for the remote {config.name}",
            hint="give --no-encryption as well, or remove that line",
        )
    return not no_encryption


def _refuse_existing(config: RemoteConfig, path: Path) -> None:
    # A file that the configuration names is the operator's own key, and is used.
    if os.path.lexists(path) and config.key_file != path:
        raise UsageError(
            f"there is a file {shown_text(str(path))} already, and a key is never overwritten",
            hint="name another file with --key-file, or move this one away if no remote needs it",
        )


def _ask(url: str) -> None:
    if not sys.stdin.isatty():
        raise UsageError(
            "init asks before it makes a remote in clear, and there is nobody to ask", hint="give -y"
        )
    warn(f"every user who can read {url} will read every file of every snapshot")
    if not click.confirm("Make a remote without encryption?", err=True):
        raise CiuicError("nothing was made")


def _refuse_remote(objects: Objects) -> None:
    from ciuic.remote.access import KeySlots, RemoteExists
    from ciuic.remote.format.documents import is_sealed, read_document
    from ciuic.remote.format.names import REMOTE_JSON
    from ciuic.remote.objects.model import NoSuchObject

    try:
        sealed = read_document(objects, REMOTE_JSON, is_sealed)
    except NoSuchObject:
        return
    if sealed and not KeySlots(objects).any_object():
        raise RemoteExists(
            f"there is a remote at {objects.url} that no key opens: an earlier `remote init` was interrupted",
            hint=f"nothing can be in it; remove its {REMOTE_JSON} with the tools of the store",
        )
    raise RemoteExists(f"there is a remote at {objects.url} already", hint="ciuic remote join uses it")


def _prove(config: RemoteConfig) -> Proof:
    from ciuic.remote.access import configured_objects
    from ciuic.remote.objects.prove import prove_create_only

    return prove_create_only(lambda: configured_objects(config, make=True), sleep=targets.proof_sleep(config))


def _make(objects: Objects, block_size: int, sealed: bool, new_key_file: Path | None) -> Remote:
    from ciuic.remote.access import init_remote
    from ciuic.remote.sealing.sealer import MasterKey

    try:
        return init_remote(objects, master=MasterKey.generate() if sealed else None, block_size=block_size)
    except BaseException:
        # It opens nothing yet, and would stop the next attempt.
        if new_key_file is not None:
            new_key_file.unlink(missing_ok=True)
        raise


def _add_slots(remote: Remote, secret: SlotSecret, extra: SlotSecret | None) -> str:
    """Add the key slots, and return the recovery key."""
    from ciuic.remote.access import add_slot

    add_slot(remote, _HOST_SLOT, secret)
    if extra is not None:
        add_slot(remote, PASSPHRASE_SLOT, extra)
    return add_recovery_key(remote, RECOVERY_SLOT)


def add_recovery_key(remote: Remote, slot: str) -> str:
    """Add a slot with a new recovery key, and return the key as it is printed."""
    from ciuic.remote.access import add_slot
    from ciuic.remote.sealing.key_slots import RECOVERY_KEY_BYTES, recovery_secret, show_recovery_key

    text = show_recovery_key(os.urandom(RECOVERY_KEY_BYTES))
    add_slot(remote, slot, recovery_secret(text))
    return text


def say_recovery_key(text: str) -> None:
    """Print a recovery key, the only time that it is seen."""
    out()
    out(f"    {text}")
    out()
    out(_LOST_KEY, bold=True)


def _with_key_file(config: RemoteConfig, path: Path) -> RemoteConfig:
    return config if config.key_command else replace(config, key_file=path)


def _document(config: RemoteConfig, remote: Remote, proof: Proof, recovery: str) -> dict[str, Any]:
    return {
        "remote": config.name,
        "url": config.url,
        "id": remote.id,
        "encrypted": remote.stored.sealed,
        "key_file": str(config.key_file) if config.key_file else None,
        "recovery_key": recovery or None,
        "races": proof.races,
        "left_in_bucket": list(proof.left),
    }


def _say(config: RemoteConfig, remote: Remote, proof: Proof, path: Path | None, recovery: str) -> None:
    note(f"{config.url} keeps create-only: {proof.races} races of {proof.racers} writers had one winner each")
    if proof.left:
        note(f"these credentials may not delete: {len(proof.left)} small objects below proof/ stay")
    out(f"remote {config.name} made at {config.url}, id {remote.id}{'' if recovery else ', in clear'}")
    if path is not None:
        out(f"key of this host: {shown_text(str(path))}")
    if recovery:
        out("recovery key, which opens the remote from anywhere:")
        say_recovery_key(recovery)
