"""``ciuic remote init``, ``join`` and ``test``: make a remote or use one that exists, in a bucket that has proved what is needed.

Guarantees: a remote is made only in a bucket that has proved create-only, and never over another one. Before anything is written,
the remote is opened, and what this host would refuse is refused (`_require_adoptable`). This host gets a key of its own, so that it
can be taken away alone; the key is durable before the remote exists, and opens the remote before the configuration names it. The
recovery key is printed once and stored nowhere. A repository that holds snapshots is never touched. What a test made is deleted
again, where the credentials allow it.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from msgspec.structs import replace

from ciuic.cli.commands.remote import targets
from ciuic.cli.shared.documents import Keys
from ciuic.cli.shared.messages import shown_text, warn
from ciuic.cli.shared.options import FrameCommand
from ciuic.cli.shared.output import Column, json_option, note, out, out_json, show_table
from ciuic.cli.shared.session import current
from ciuic.errors import CiuicError, ConfigError, NotFound, NotPermitted, Unreachable, UsageError
from ciuic.units import human_size, plural

if TYPE_CHECKING:
    from ciuic.cli.shared.session import Session
    from ciuic.config import RemoteConfig
    from ciuic.remote.access import Remote
    from ciuic.remote.objects.model import Objects
    from ciuic.remote.objects.store_check import Measurement, Proof
    from ciuic.remote.sealing.key_slots import SlotSecret


_REMOTE = Keys(
    "remote, url, id, encrypted, key_file (or null), slot? (of `join`; or null), recovery_key? (of `init`, the only time; or null),"
    " races? (of `init`), left_in_bucket? (of `init`), config, config_changed, repository (or null), repository_state (`made`,"
    " `replaced`, `shares`, `own-identity`, `later`), upload_started",
    "`remote init`, `remote join`",
)
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
    from ciuic.remote.access import configured_objects

    session = current()
    config = targets.find_remote(
        session.config, place, name=name, endpoint=endpoint, region=region, is_new=True
    )
    sealed = _is_sealed(config, config in session.config.remotes, no_encryption)
    if not sealed and (passphrase or key_file):
        raise UsageError(
            "a remote without encryption has no keys", hint="leave --passphrase and --key-file out"
        )
    # Everything that can be refused is refused before anything is made.
    file = _require_writable_config(session)
    path = _key_file_path(session, config, key_file)
    if sealed and not config.key_command:
        _refuse_existing(config, path)
    will_be = _with_key_file(config, path) if sealed else config
    _require_adoptable(session, replace(will_be, encryption=sealed), file)
    extra = targets.new_passphrase() if passphrase else None
    if not sealed and not yes:
        _ask(config.url)
    objects = configured_objects(config, make=True)
    try:
        _refuse_remote(objects)
        proof = _prove(config)
        is_new = sealed and not config.key_command and not path.exists()
        secret = _host_secret(config, path) if sealed else None
        remote = _make(
            config, objects, session.config.repository.block_size_bytes, sealed, path if is_new else None
        )
        recovery = _add_slots(remote, secret, extra) if secret is not None else ""
        if not as_json:
            _say(config, remote, proof, path if secret and not config.key_command else None, recovery)
        config = will_be
        adopted = adopt(session, config, remote, file)
    finally:
        objects.close()
    if as_json:
        out_json(
            _document(
                config,
                remote,
                adopted,
                recovery_key=recovery or None,
                races=proof.races,
                left_in_bucket=proof.left,
            )
        )
    else:
        say(adopted)


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
    from ciuic.remote.access import KeySlots, RemoteExists, refuse_lost_identity
    from ciuic.remote.documents import is_sealed, read_document
    from ciuic.remote.object_names import REMOTE_JSON
    from ciuic.remote.objects.model import NoSuchObject

    try:
        sealed = read_document(objects, REMOTE_JSON, is_sealed)
    except NoSuchObject:
        # Before the proof, which takes long.
        return refuse_lost_identity(objects)
    if sealed and not KeySlots(objects).any_object():
        raise RemoteExists(
            f"there is a remote at {objects.url} that no key opens: an earlier `remote init` was interrupted",
            hint=f"nothing can be in it; remove its {REMOTE_JSON} with the tools of the store",
        )
    raise RemoteExists(f"there is a remote at {objects.url} already", hint="ciuic remote join uses it")


def _prove(config: RemoteConfig) -> Proof:
    from ciuic.remote.access import configured_objects
    from ciuic.remote.objects.store_check import prove_create_only

    # Over the internet it takes up to half a minute.
    note(f"trying whether {config.url} lets exactly one of several writers make an object ...")
    return prove_create_only(
        lambda: configured_objects(config, make=True),
        sleep=targets.proof_sleep(config),
    )


def _make(
    config: RemoteConfig, objects: Objects, block_size: int, sealed: bool, new_key_file: Path | None
) -> Remote:
    from ciuic.remote.access import init_remote
    from ciuic.remote.sealing.sealer import MasterKey

    try:
        return init_remote(
            objects,
            master=MasterKey.generate() if sealed else None,
            block_size=block_size,
        )
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


def _document(config: RemoteConfig, remote: Remote, adopted: Adopted, **further: object) -> dict[str, Any]:
    return _REMOTE.of(
        adopted,
        remote=config.name,
        url=config.url,
        id=remote.id,
        encrypted=remote.stored.sealed,
        key_file=config.key_file,
        config=adopted.config_file,
        repository_state=adopted.choice,
        **further,
    )


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
    from ciuic.remote.access import configured_objects

    session = current()
    config = targets.find_remote(
        session.config, place, name=name, endpoint=endpoint, region=region, is_new=True
    )
    if no_encryption:
        config = replace(config, encryption=False)
    file = _require_writable_config(session)
    path = _key_file_path(session, config, key_file)
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
            _require_adoptable(session, config, file)
            slot = _host_slot(named, remote, path)
        adopted = adopt(session, config, remote, file)
    finally:
        objects.close()
    if as_json:
        out_json(_document(config, remote, adopted, slot=slot or None))
        return
    out(f"this host uses the remote {config.name} at {config.url}, id {remote.id}")
    if slot:
        key = shown_text(str(config.key_file)) if config.key_file else "the key command"
        out(f"key of this host: {key} (slot {slot})")
    say(adopted)


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
    from ciuic.remote.access import KeySlots, add_slot
    from ciuic.remote.errors import WrongKey
    from ciuic.remote.sealing.key_slots import own_slot, read_key_file

    # The file that the configuration names, or that an interrupted join has left.
    is_there = not config.key_command and path.exists()
    secret = read_key_file(str(path)) if is_there else _host_secret(config, path)
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


_UPLOAD_UNIT = "ciuic-upload.service"


class Adopted(NamedTuple):
    """Result of adopting a remote on this host."""

    config_file: Path
    config_changed: bool
    repository: Path | None
    """None: not known yet, as no directory is protected."""
    choice: str
    """Outcome as in `RepositoryChoice`; ``later`` where the repository is made by ``ciuic protect``."""
    upload_started: bool


def _key_file_path(session: Session, config: RemoteConfig, given: Path | None) -> Path:
    """Return where the key file of this host is or will be: named, configured, or beside the configuration.

    Raises:
        UsageError: the configuration names another one, from which the upload would take the key.
    """
    from ciuic.config import writable_file

    if given is not None:
        path = Path(os.path.abspath(given))
        if config.key_command or config.key_file not in (None, path):
            raise UsageError(
                f"the configuration has a key of its own for the remote {config.name}: "
                f"{config.key_file or config.key_command[0]}",
                hint="leave --key-file out, or change the configuration",
            )
        return path
    if config.key_file is not None:
        return config.key_file
    return writable_file(session.config_option).parent / f"remote-{config.name}.key"


def _host_secret(config: RemoteConfig, path: Path) -> SlotSecret:
    """Return the key of this host: what the configured command prints, the configured file, or a new file.

    Raises:
        UsageError: there is a file already, and the configuration does not name it.
    """
    from ciuic.remote.sealing.key_slots import make_key_file, read_key_file, run_key_command

    if config.key_command:
        return run_key_command(config.key_command)
    if config.key_file == path and path.exists():
        return read_key_file(str(path))
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    return make_key_file(str(path))


def _require_writable_config(session: Session) -> Path:
    """Return the configuration file that will name the remote; raise before anything is made if it cannot be written."""
    from ciuic.config import writable_file
    from ciuic.config.keys import is_flat

    file = writable_file(session.config_option)
    if is_flat(file):
        raise ConfigError(
            f"{file} is in the flat format, which has no remotes",
            hint="`ciuic config convert` makes a TOML file of it",
        )
    there = file
    while not there.exists() and there != there.parent:
        there = there.parent
    if not os.access(there, os.W_OK):
        raise NotPermitted(
            f"{file} may not be written", hint="run it as root, or name another file with --config"
        )
    return file


def _require_adoptable(session: Session, config: RemoteConfig, file: Path) -> None:
    """Raise what `adopt` would raise of the configuration file and the place of the repository, before anything is made.

    Args:
        session: Session.
        config: The remote as it will be written.
        file: The configuration file.
    """
    from ciuic.config import write_remote

    write_remote(file, config, dry_run=True)
    _repository_place(session)


def adopt(session: Session, config: RemoteConfig, remote: Remote, file: Path) -> Adopted:
    """Write the configuration, have a repository, tell the daemon, and start the upload."""
    from ciuic.config import write_remote

    # No remote in clear is configured by accident: the user who gives its URL has been asked.
    changed = write_remote(file, replace(config, encryption=remote.stored.sealed))
    runs = session.control.is_running()
    path, choice = _repository(session, remote, daemon_runs=runs)
    if runs:
        _reload(session)
    return Adopted(file, changed, path, choice, _start_upload(file))


def _repository(session: Session, remote: Remote, *, daemon_runs: bool) -> tuple[Path | None, str]:
    from ciuic.remote.access import join_repository, shares_chunks
    from ciuic.repository import Repository

    path = _repository_place(session)
    if path is None:
        return None, "later"
    if daemon_runs and Repository.exists(path):
        # The daemon knows the identity of its repository since its start.
        with Repository.open(path) as repository:
            if shares_chunks(repository, remote):
                return path, "shares"
            empty = not repository.snapshots.names()
        if empty:
            warn(
                "the repository is empty and has another identity than the remote, but the daemon uses it",
                hint="to share chunks with other hosts: ciuic stop, ciuic remote join, then start it again",
            )
        return path, "own-identity"
    return path, join_repository(path, remote, refuse_foreign=not session.trusts_repository).value


def _repository_place(session: Session) -> Path | None:
    """Return where the repository is or will be; None if no directory is protected yet.

    Raises:
        CiuicError: it must not be there: others may write there, or its disk is absent.
    """
    from ciuic.cli.shared.new_repository import refuse_absent_disk
    from ciuic.repository import Repository
    from ciuic.repository.trust import require_own

    try:
        path = session.repository_dir
        roots = session.config.roots
    except ConfigError:
        return None
    require_own(path, trusted=session.trusts_repository)
    if not Repository.exists(path):
        refuse_absent_disk(session, roots, path)
    return path


def _reload(session: Session) -> None:
    try:
        session.control.reload()
    except CiuicError as error:
        if not isinstance(error, Unreachable):
            warn(
                f"the daemon did not take over the configuration: {shown_text(error.message)}",
                hint="ciuic reload",
            )


def _start_upload(file: Path) -> bool:
    """Let the unit that uploads write to remotes that are directories, start it where it is installed, and return whether it was."""
    from ciuic.cli.shared.systemd import Systemd, directories_of
    from ciuic.config import load_config

    system = Systemd()
    if not system.runs or not (system.unit_dir / _UPLOAD_UNIT).exists():
        return False
    try:
        if not system.has_places(places := directories_of(load_config(file).remotes)):
            system.write_places(places)
            system.call("daemon-reload")
        # restart: a process that runs has read the configuration before.
        system.call("restart", _UPLOAD_UNIT)
    except CiuicError as error:
        warn(shown_text(error.message), hint=f"systemctl restart {_UPLOAD_UNIT}")
        return False
    return True


def say(adopted: Adopted) -> None:
    """Tell in words what was done on this host, and what is left to do."""
    if adopted.config_changed:
        note(f"{shown_text(str(adopted.config_file))} names the remote")
    where = shown_text(str(adopted.repository))
    hosts = "all hosts of the remote but those whose repository kept its own identity"
    if adopted.choice == "made":
        note(f"repository {where} made; it shares chunks with {hosts}")
    elif adopted.choice == "replaced":
        note(f"the empty repository {where} was made anew; it shares chunks with {hosts}")
    elif adopted.choice == "own-identity":
        note(
            f"the repository {where} keeps its own identity: its snapshots go to the remote, "
            "but share no chunks with those of other hosts"
        )
    elif adopted.choice == "later":
        note(
            "no directory is protected yet; `ciuic protect PATH` makes a repository that shares chunks with the remote"
        )
    if adopted.upload_started:
        note(f"{_UPLOAD_UNIT} is running: `ciuic remote status` shows how far it is")
    else:
        note("nothing uploads yet: `ciuic remote upload` does, under systemd after `ciuic service install`")


@click.command("repair-identity", cls=FrameCommand)
@targets.place_argument
@json_option
def repair_identity(place: str, as_json: bool) -> None:
    """Write the remote.json of a configured remote again, where it was lost.

    On a host that has used the remote: with its key, the id that it knows, and the block size of its repository. Nothing is written
    that a key slot, or in clear an entry of a log, does not verify, and nothing over a remote.json that is there.
    """
    from ciuic.protocol.stored_remotely import upload_state_dir
    from ciuic.remote import access
    from ciuic.remote.upload_status import read_status

    session = current()
    config = targets.find_remote(session.config, place)
    try:
        repository = session.repository
    except (ConfigError, NotFound):
        repository = None
    state = upload_state_dir()
    status = read_status(config.name, state)
    known = [status.remote_id] if status is not None and status.remote_id else []
    objects = access.configured_objects(config)
    try:
        remote = access.repair_identity(
            objects,
            access.configured_secrets(config),
            known_ids=known,
            repository=repository,
            block_size=session.config.repository.block_size_bytes,
        )
    finally:
        objects.close()
    if as_json:
        out_json({"remote": config.name, "url": config.url, "id": remote.id})
    else:
        out(f"remote.json of the remote {config.name} at {config.url} is there again, id {remote.id}")


_MIB = 1 << 20


@click.command("test", cls=FrameCommand)
@targets.place_options
@click.option(
    "--size",
    type=click.IntRange(1, 1024),
    default=128,
    show_default=True,
    metavar="MIB",
    help="MiB to write and read for the rates.",
)
@json_option
def measure(place: str, name: str, endpoint: str, region: str, size: int, as_json: bool) -> None:
    """Test whether a bucket serves as a remote, and how fast it is.

    Many writers create one name at once, which must have one winner that stays. Then large and small objects are
    written, read, listed and deleted. Requests and traffic cost what the store charges for them.
    """
    from ciuic.remote.access import configured_objects
    from ciuic.remote.objects import store_check

    config = targets.find_remote(
        current().config, place, name=name, endpoint=endpoint, region=region, is_new=True
    )
    count = min(8, size)
    found = store_check.measure(
        lambda: configured_objects(config),
        object_bytes=size * _MIB // count,
        objects=count,
        sleep=targets.proof_sleep(config),
    )
    key = _key(config)
    if as_json:
        document = {
            "remote": config.name,
            "url": config.url,
            "create_only": True,
            "opens": key,
            **found._asdict(),
        }
        out_json({**document, "proof": found.proof._asdict()})
        return
    _print(found, key)


def _key(config: RemoteConfig) -> str:
    """Return in a word what the configured keys open; raise if they do not open the remote."""
    from ciuic.remote.access import configured_objects

    objects = configured_objects(config)
    try:
        remote = targets.opened(config, objects)
    except NotFound:
        return "no remote"
    finally:
        objects.close()
    return "encrypted" if remote.stored.sealed else "in clear"


def _print(found: Measurement, key: str) -> None:
    proof = found.proof
    rows = [
        ("create-only", f"{proof.races} races of {proof.racers} writers, one winner each"),
        ("write", f"{human_size(found.put_bytes_per_second)}/s"),
        ("read", f"{human_size(found.get_bytes_per_second)}/s"),
        ("create of 200 bytes", _milliseconds(found.small_put_seconds)),
        ("read of 200 bytes", _milliseconds(found.small_get_seconds)),
        ("read of 256 KiB within an object", _milliseconds(found.range_seconds)),
        ("list", _milliseconds(found.list_seconds)),
        ("remote", {"no remote": "none here yet"}.get(key, f"opened, {key}")),
    ]
    show_table([Column("TEST"), Column("RESULT", shrink=True)], rows)
    if proof.left:
        note(
            f"these credentials may not delete: {plural(len(proof.left), 'object below proof/ stays', 'objects below proof/ stay')}"
        )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"
