"""``ciuic remote join``: has this host use a remote that another one has made.

Guarantees: the remote is opened, and this host is sure that it can use it, before anything is written; this host gets a key of its own, so that it can be taken
away alone.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec.structs import replace

from ciuic.cli.commands.remote import targets
from ciuic.cli.shared.names import shown_text
from ciuic.cli.shared.options import FrameCommand
from ciuic.cli.shared.output import json_option, out, out_json
from ciuic.cli.shared.session import current
from ciuic.errors import UsageError

if TYPE_CHECKING:
    from ciuic.config import RemoteConfig
    from ciuic.remote.access import Remote
    from ciuic.remote.objects.model import Objects
    from ciuic.remote.sealing.key_slots import SlotSecret


@click.command("join", cls=FrameCommand)
@targets.place_options
@click.option(
    "--open-with",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Key file that opens the remote, such as one of another host. Otherwise: CIUIC_REMOTE_PASSPHRASE,"
    " CIUIC_REMOTE_RECOVERY_KEY, CIUIC_REMOTE_KEY_FILE, or what is typed.",
)
@click.option(
    "--key-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where the key of this host is written; default: remote-NAME.key beside the configuration file.",
)
@click.option("--no-encryption", is_flag=True, help="Use a remote that stores everything in clear.")
@json_option
def join(
    place: str,
    name: str,
    endpoint: str,
    region: str,
    open_with: Path | None,
    key_file: Path | None,
    no_encryption: bool,
    as_json: bool,
) -> None:
    """Use the remote at URL, or the one that is configured, from this host.

    A repository that does not exist yet, or holds nothing, is made such that this host shares chunks with the others.
    """
    from ciuic.cli.commands.remote import adoption
    from ciuic.remote.access import configured_objects

    session = current()
    config = targets.find_remote(session.config, place, name=name, endpoint=endpoint, region=region)
    if no_encryption:
        config = replace(config, encryption=False)
    file = adoption.require_writable_config(session)
    path = adoption.key_file_path(session, config, key_file)
    named = config
    objects = configured_objects(config)
    try:
        remote = _opened(config, objects, open_with)
        config = replace(config, encryption=remote.stored.sealed)
        slot = ""
        if remote.master is not None:
            if not config.key_command:
                config = replace(config, key_file=path)
            # A slot that is made for a host which then cannot use the remote would stay there for ever.
            adoption.require_adoptable(session, config, file)
            slot = _host_slot(named, remote, path)
        adopted = adoption.adopt(session, config, remote, file)
    finally:
        objects.close()
    if as_json:
        document = {
            "remote": config.name,
            "url": config.url,
            "id": remote.id,
            "encrypted": remote.stored.sealed,
            "key_file": str(config.key_file) if config.key_file else None,
            "slot": slot or None,
        }
        out_json({**document, **adopted.document()})
        return
    out(f"this host uses the remote {config.name} at {config.url}, id {remote.id}")
    if slot:
        key = shown_text(str(config.key_file)) if config.key_file else "the key command"
        out(f"key of this host: {key} (slot {slot})")
    adoption.say(adopted)


def _opened(config: RemoteConfig, objects: Objects, open_with: Path | None) -> Remote:
    from ciuic.cli.shared.remotes import goes_on
    from ciuic.remote.access import configured_secrets, open_configured
    from ciuic.remote.sealing.key_slots import read_key_file

    if not config.encryption:
        return open_configured(config, objects, [])
    # A key file that is configured and not there is the one that is to be made.
    missing = config.key_file is not None and not config.key_file.exists()
    secrets: list[SlotSecret] = [read_key_file(str(open_with))] if open_with else []
    secrets += configured_secrets(replace(config, key_file=None) if missing else config)
    if not secrets:
        if not sys.stdin.isatty():
            raise UsageError(
                "a remote is joined with one of its keys, and none was given",
                hint="--open-with FILE, CIUIC_REMOTE_PASSPHRASE or CIUIC_REMOTE_RECOVERY_KEY; --no-encryption for a remote in clear",
            )
        secrets = [targets.typed_secret()]
    return open_configured(config, objects, secrets, goes_on=goes_on)


def _host_slot(config: RemoteConfig, remote: Remote, path: Path) -> str:
    """Return the slot that the key of this host opens; make the key, and the slot, where there is none."""
    from ciuic.cli.commands.remote.adoption import host_secret
    from ciuic.remote.access import KeySlots, add_slot
    from ciuic.remote.errors import WrongKey
    from ciuic.remote.sealing.key_slots import own_slot, read_key_file

    # The file that the configuration names, or that an interrupted join has left.
    is_there = not config.key_command and path.exists()
    secret = read_key_file(str(path)) if is_there else host_secret(config, path)
    remote_id = bytes.fromhex(remote.id)
    try:
        return KeySlots(remote.objects).unlock(remote_id, secret)[0].slot
    except WrongKey:
        if is_there and config.key_file != path:
            raise UsageError(
                f"there is a file {shown_text(str(path))} already, whose key does not open this remote",
                hint="name another file with --key-file",
            ) from None
    slot = own_slot(remote_id, secret, socket.gethostname())
    add_slot(remote, slot, secret)
    return slot
