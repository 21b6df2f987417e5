"""``ciuic remote keys``: the key slots of a remote.

Guarantees: a secret appears neither on a command line nor in output, except a new recovery key, once; the last slot
stays.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ciuic.cli.commands.remote import targets
from ciuic.cli.commands.remote.init_join import (
    PASSPHRASE_SLOT,
    RECOVERY_SLOT,
    add_recovery_key,
    say_recovery_key,
)
from ciuic.cli.shared import times
from ciuic.cli.shared.documents import Keys
from ciuic.cli.shared.messages import shown_text, warn
from ciuic.cli.shared.options import FrameCommand, FrameGroup
from ciuic.cli.shared.output import Column, json_option, note, out, out_json, show_table
from ciuic.cli.shared.session import current
from ciuic.errors import CiuicError, UsageError
from ciuic.units import plural

if TYPE_CHECKING:
    from ciuic.config import RemoteConfig
    from ciuic.remote.access import Remote
    from ciuic.remote.sealing.key_slots import SlotSecret

_SLOTS = Keys(
    "remote, slots, unusable",
    "`remote keys list`",
    slots=Keys("slot, kind, created"),
    unusable=Keys("slot, problem"),
)
_KEY_FILE_SLOT = "key-file"
_COMMAND_SLOT = "command"
_MAX_PROBLEMS_SHOWN = 8


@click.group("keys", cls=FrameGroup)
def keys() -> None:
    """List, add or remove the keys that open a remote."""


@keys.command("list", cls=FrameCommand)
@targets.place_argument
@json_option
def list_(place: str, as_json: bool) -> None:
    """List the key slots; needs no key."""
    from ciuic.remote.access import KeySlots, configured_objects

    config = targets.find_remote(current().config, place)
    objects = configured_objects(config)
    found = KeySlots(objects)
    try:
        slots = found.all()
    finally:
        objects.close()
    if as_json:
        out_json(
            _SLOTS.of(
                remote=config.name,
                slots=slots,
                unusable=[{"slot": one.slot, "problem": one.problem.message} for one in found.unusable],
            )
        )
    elif not slots and not found.unusable:
        note("there are no key slots: the remote is not encrypted, or not made yet")
    else:
        rows: list[tuple[str, str, str]] = [
            (one.slot, one.kind, times.clock(one.created_ns)) for one in slots
        ]
        rows += [(shown_text(one.slot), "unusable", "") for one in found.unusable]
        show_table([Column("SLOT"), Column("KIND"), Column("CREATED")], rows)
    if found.unusable:
        problems = "; ".join(one.problem.message for one in found.unusable[:_MAX_PROBLEMS_SHOWN])
        warn(
            f"{plural(len(found.unusable), 'object')} below keys/ cannot be used as key slots: {shown_text(problems)}",
            hint="ciuic remote keys remove SLOT removes one",
        )


@keys.command("add", cls=FrameCommand)
@targets.place_argument
@click.option("--passphrase", is_flag=True, help="A passphrase (CIUIC_REMOTE_PASSPHRASE, or asked for).")
@click.option(
    "--key-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The key in FILE; it is made if it does not exist.",
)
@click.option("--key-command", is_flag=True, help="What key_command of the configuration prints.")
@click.option("--recovery", is_flag=True, help="A new recovery key, which is printed once.")
@click.option("--slot", default="", metavar="SLOT", help="Name of the slot: a-z, 0-9 and -.")
@json_option
def add(
    place: str,
    passphrase: bool,
    key_file: Path | None,
    key_command: bool,
    recovery: bool,
    slot: str,
    as_json: bool,
) -> None:
    """Add a key. The remote is opened with one that it has."""
    from ciuic.remote.access import add_slot, configured_objects

    if sum((passphrase, key_file is not None, key_command, recovery)) != 1:
        raise UsageError("give one of --passphrase, --key-file, --key-command and --recovery")
    config = targets.find_remote(current().config, place)
    objects = configured_objects(config)
    try:
        remote = targets.opened(config, objects)
        _require_encryption(remote)
        name = slot or _default_slot(passphrase, key_file, key_command)
        _check_free(remote, name)
        text = ""
        if recovery:
            text = add_recovery_key(remote, name)
        else:
            add_slot(remote, name, _secret(config, passphrase, key_file))
    finally:
        objects.close()
    if as_json:
        out_json({"remote": config.name, "slot": name, "recovery_key": text or None})
        return
    out(f"key slot {name} added to the remote {config.name}")
    if text:
        say_recovery_key(text)


def _require_encryption(remote: Remote) -> None:
    if remote.master is None:
        raise UsageError("the remote is not encrypted, and has no keys")


def _default_slot(passphrase: bool, key_file: Path | None, key_command: bool) -> str:
    if passphrase:
        return PASSPHRASE_SLOT
    return _KEY_FILE_SLOT if key_file else _COMMAND_SLOT if key_command else RECOVERY_SLOT


def _check_free(remote: Remote, name: str) -> None:
    """UsageError before a key file is made, or a passphrase asked for, for a slot that cannot be."""
    from ciuic.remote.access import KeySlots
    from ciuic.remote.object_names import parse_slot
    from ciuic.remote.sealing.key_slots import digits_of

    if parse_slot(f"keys/{name}") is None:
        raise UsageError(f"the name of a key slot has 1 to 32 characters of a-z, 0-9 and -, got {name!r}")
    if digits_of(name):
        raise UsageError(
            f"the name {name} says which key opens the slot, as those that `ciuic remote join` gives do",
            hint="choose another --slot NAME",
        )
    if KeySlots(remote.objects).has(name):
        raise UsageError(
            f"there is a key slot {name} already", hint="--slot NAME gives the new one another name"
        )


def _secret(config: RemoteConfig, passphrase: bool, key_file: Path | None) -> SlotSecret:
    from ciuic.remote.sealing.key_slots import make_key_file, read_key_file, run_key_command

    if passphrase:
        return targets.new_passphrase()
    if key_file is not None:
        path = os.path.abspath(key_file)
        return read_key_file(path) if os.path.lexists(path) else make_key_file(path)
    if not config.key_command:
        raise UsageError(f"the configuration has no key_command for the remote {config.name}")
    return run_key_command(config.key_command)


@keys.command("remove", cls=FrameCommand)
@click.argument("slot", metavar="SLOT")
@targets.place_argument
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
def remove(slot: str, place: str, yes: bool, as_json: bool) -> None:
    """Remove a key slot: its key opens the remote no more.

    A user of that key may have kept what it opens. The last slot cannot be removed. What lies among the slots and is none is removed
    by its name as well.
    """
    from ciuic.remote.access import KeySlots, configured_objects, remove_slot
    from ciuic.remote.sealing.key_slots import shown_names

    config = targets.find_remote(current().config, place)
    objects = configured_objects(config)
    try:
        remote = targets.opened(config, objects)
        _require_encryption(remote)
        kinds = {one.slot: one.kind for one in KeySlots(objects).all()}
        if not yes:
            _ask(config, slot, [name for name in kinds if name != slot])
        elif kinds.get(slot) == "recovery" and list(kinds.values()).count("recovery") == 1:
            warn(
                f"{slot} was the last recovery key: if {shown_names(sorted(kinds.keys() - {slot})) or 'no other key'} is lost, so is the remote",
                hint="ciuic remote keys add --recovery makes another",
            )
        try:
            remove_slot(remote, slot)
        except ValueError as error:
            raise UsageError(str(error)) from None
    finally:
        objects.close()
    if as_json:
        out_json({"remote": config.name, "removed": slot})
    else:
        note(f"key slot {shown_text(slot)} removed from the remote {config.name}")


def _ask(config: RemoteConfig, slot: str, left: list[str]) -> None:
    from ciuic.remote.sealing.key_slots import shown_names

    if not sys.stdin.isatty():
        raise UsageError("remove asks before it removes a key, and there is nobody to ask", hint="give -y")
    if left:
        warn(
            f"the remote {config.name} will be opened by {shown_names(left)} alone: make sure that you have such a key"
        )
    if not click.confirm(f"Remove the key slot {shown_text(slot)}?", err=True):
        raise CiuicError("nothing was removed")
