"""``ciuic remote upload`` and ``ciuic remote status``: the process that sends snapshots, and how far the remotes are behind.

Guarantees: without ``--contact`` nothing is asked of a remote, so the answer of ``status`` comes at once also while the network is
gone.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ciuic.cli.commands.remote import targets
from ciuic.cli.shared import times
from ciuic.cli.shared.documents import Keys
from ciuic.cli.shared.messages import complain, plural, shown_text, warn
from ciuic.cli.shared.options import ID, FrameCommand
from ciuic.cli.shared.output import json_option, note, out, out_json, out_prose
from ciuic.cli.shared.remotes import waiting_aloud
from ciuic.cli.shared.session import Session, current
from ciuic.errors import CiuicError, ConfigError, NotFound, NotPermitted, Partial
from ciuic.units import human_duration, human_size

if TYPE_CHECKING:
    from ciuic.config import Config, RemoteConfig
    from ciuic.config.model import RemotePrice
    from ciuic.protocol.stored_remotely import RemoteLag
    from ciuic.remote.access import Remote
    from ciuic.remote.stored_facts import StoredState
    from ciuic.remote.upload_status import UploadStatus
    from ciuic.remote.uploader import Labels
    from ciuic.repository import Repository, SnapshotInfo
    from ciuic.types import Snapshot


_STATE = Keys("snapshot, time, epoch, step")
_TRAINING = Keys("training, stored, local (as `stored`)", stored=_STATE)
_BEHIND = Keys("snapshots, size_bytes, seconds, stored, newest|null, newest_time|null")
_UPLOAD = Keys(
    "running, pid, time, waits_for, other_writers, bytes_per_second, last_snapshot|null, last_seconds, requests (by kind), sent_bytes,"
    " received_bytes, price"
)
_CONTACT = Keys(
    "id, encrypted, block_size_bytes, created, open_seconds, slots, servers, spaces, size_bytes, price_month"
)
_REMOTE = Keys(
    "remote, url, id|null, encrypted, behind (or null), problem, upload (or null), last_drill (or null), trainings,"
    " contact? (with `--contact`; `error` and `hint` where that failed)",
    "each of the `remotes` of `remote status`",
    behind=_BEHIND,
    upload=_UPLOAD,
    last_drill=Keys("time, verdict, seconds, reason, snapshot|null, files, bytes_read, estimated_seconds"),
    trainings=_TRAINING,
    contact=_CONTACT,
)
# What another machine says of itself may have any length.
_MAX_SHOWN = 200
_LABEL_WIDTH = 11
_PUTS = ("put", "create", "list")
_GETS = ("get", "head")
_PRICE_UNIT = 1000
_GB = 10**9


@click.command("status", cls=FrameCommand)
@targets.place_argument
@click.option(
    "--contact", is_flag=True, help="Ask the remote as well what it holds; lists its packs and logs."
)
@json_option
def status(place: str, contact: bool, as_json: bool) -> None:
    """Show the remotes: how far they are behind, what they wait for, what was sent.

    Without --contact this is what this host knows, also while no network is there.
    """
    session = current()
    chosen = targets.find_remotes(session.config, place)
    documents, failures = [], []
    for config in chosen:
        document = _facts(session, config, contact=contact)
        if contact:
            try:
                with waiting_aloud(session.verbosity)(config.name):
                    document["contact"] = _contact(session, config)
            except CiuicError as error:
                document["contact"] = {"error": error.message, "hint": error.hint}
                failures.append(error)
        documents.append(document)
    if as_json:
        out_json({"remotes": documents})
    else:
        for index, document in enumerate(documents):
            if index:
                out()
            _print(document)
    if failures:
        raise failures[0]


def _facts(session: Session, config: RemoteConfig, *, contact: bool) -> dict[str, Any]:
    from ciuic.protocol.last_drill import read_last_drill
    from ciuic.protocol.stored_remotely import upload_state_dir
    from ciuic.remote.upload_status import read_status

    upload = read_status(config.name, upload_state_dir())
    drill = read_last_drill(config.name)
    lag, problem = _lag(session, config, contact=contact)
    return _REMOTE.of(
        remote=config.name,
        url=config.url,
        id=upload.remote_id if upload else "",
        encrypted=config.encryption,
        behind=None if lag is None else _BEHIND.of(lag, newest_time_ns=lag.newest_ns),
        problem=problem or (lag.flaw if lag else ""),
        upload=None if upload is None else _upload(upload, config.price),
        last_drill=drill,
        trainings=[] if lag is None else _trainings(session, config, upload),
    )


def _trainings(session: Session, config: RemoteConfig, upload: UploadStatus | None) -> list[dict[str, Any]]:
    """Return for each training its newest state on the remote, and the newest here."""
    from ciuic.protocol.stored_remotely import upload_state_dir
    from ciuic.remote.stored_facts import newest_stored_states
    from ciuic.types import STATE_TAGS

    repository = session.repository
    newest: dict[bytes, SnapshotInfo] = {}
    for info in repository.snapshots.list():
        # Newest first. A snapshot of files may have the tag as well, from an operator.
        if len(info.roots) == 1 and info.roots[0] not in newest and not STATE_TAGS.isdisjoint(info.tags):
            with suppress(CiuicError):
                if repository.snapshots.load(info.id).is_state:
                    newest[info.roots[0]] = info
    spaces = [repository.id, *([upload.remote_id] if upload and upload.remote_id else [])]
    stored = newest_stored_states(upload_state_dir(), config, spaces)
    found = []
    for root in sorted(newest.keys() | stored.keys()):
        here, there = newest.get(root), stored.get(root)
        found.append(
            _TRAINING.of(
                training=root.strip(b"/"),
                stored=there,
                local=None if here is None else _local_state(repository, here, there),
            )
        )
    return found


def _local_state(repository: Repository, info: SnapshotInfo, stored: StoredState | None) -> dict[str, Any]:
    epoch, step = None, None
    if stored is not None and stored.snapshot == info.id:
        # Nothing has to be read, and half a second of imports is saved.
        epoch, step = stored.epoch, stored.step
    else:
        from ciuic.training.format.reading import read_facts

        # What cannot be read here says nothing of the remote.
        with suppress(CiuicError, ValueError):
            facts = read_facts(repository, info.id)
            epoch, step = facts.epoch, facts.step
    return _STATE.of(info, snapshot=info.id, epoch=epoch, step=step)


def _lag(session: Session, config: RemoteConfig, *, contact: bool) -> tuple[RemoteLag | None, str]:
    from ciuic.protocol.stored_remotely import remote_lag

    try:
        repository = session.repository
        infos = repository.snapshots.list()
    except NotFound:
        return None, "there is no repository yet"
    except CiuicError as error:
        return None, error.message
    look = ""
    if contact:
        from ciuic.remote.remote_look import looks

        waiting = waiting_aloud(session.verbosity)
        look = looks([config], repository, away=False, waiting=waiting).get(config.name, "")
    return remote_lag(config, repository.id, infos, now_ns=session.now_ns, look=look), ""


def _upload(upload: UploadStatus, price: RemotePrice) -> dict[str, Any]:
    return _UPLOAD.of(upload, running=upload.runs, price=_price(upload.requests, price))


def _price(requests: dict[str, int], price: RemotePrice) -> float | None:
    """Return what the requests cost; None if no price is configured."""
    if price.put_per_1000 is None and price.get_per_1000 is None:
        return None
    puts = sum(requests.get(kind, 0) for kind in _PUTS) * (price.put_per_1000 or 0.0)
    gets = sum(requests.get(kind, 0) for kind in _GETS) * (price.get_per_1000 or 0.0)
    return (puts + gets) / _PRICE_UNIT


def _contact(session: Session, config: RemoteConfig) -> dict[str, Any]:
    from ciuic.remote.access import configured_objects, find_spaces, key_slots, lost_spaces, repository_spaces
    from ciuic.remote.objects.ssh_objects import SshObjects
    from ciuic.remote.objects.wrappers import CountingObjects

    store = configured_objects(config)
    objects = CountingObjects(store)
    try:
        began = time.monotonic()
        remote = targets.opened(config, objects)
        seconds = time.monotonic() - began
        slots = [one.slot for one in key_slots(objects)]
        found = find_spaces(objects)
        damaged = lost_spaces(objects, found)
        spaces = [_space(remote, one) for one in (remote, *repository_spaces(remote, found, damaged))]
        servers = [{"url": store.url, **store.server()._asdict()}] if isinstance(store, SshObjects) else []
    finally:
        objects.close()
    session.say_damaged(damaged)
    stored = sum(one["size_bytes"] for one in spaces)
    month = config.price.gb_month
    return _CONTACT.of(
        remote.stored,
        id=remote.id,
        encrypted=remote.stored.sealed,
        block_size_bytes=remote.stored.block_size,
        open_seconds=seconds,
        slots=slots,
        servers=servers,
        spaces=spaces,
        size_bytes=stored,
        price_month=None if month is None else stored / _GB * month,
    )


def _space(remote: Remote, space: Remote) -> dict[str, Any]:
    """Return what is in the space of the hosts that share chunks, or of one repository."""
    from ciuic.remote.log_reader import LogReader
    from ciuic.remote.object_names import parse_manifest
    from ciuic.remote.reading.cache_directory import open_cache
    from ciuic.remote.remote_index import list_packs

    sizes = [info.size_bytes for info in list_packs(space.objects).values()]
    with ExitStack() as closing:
        cache_path = None
        # The cache of those who list snapshots: logs have an entry for each. All are read where others may write to it.
        with suppress(NotPermitted):
            cache_path = str(closing.enter_context(open_cache(remote, space)).path / "logs")
        reader = LogReader(
            space.objects, space.sealer, cache_path=cache_path, skip_damaged=True, passes_cuts=True
        )
        reader.refresh()
    for damaged in reader.damaged.values():
        warn(damaged.error.message, hint="ciuic check --remote --repair")
    names = [parsed for name in reader.live() if (parsed := parse_manifest(name))]
    return {
        "id": space.id,
        "snapshots": len(names),
        "hosts": sorted({name.host for name in names}),
        "packs": len(sizes),
        "size_bytes": sum(sizes),
    }


def _say(text: str, **style: Any) -> None:
    out_prose(text, _LABEL_WIDTH, **style)


def _print(document: dict[str, Any]) -> None:
    clear = "" if document["encrypted"] else ", in clear"
    identity = f", id {document['id']}" if document["id"] else ""
    _say(f"remote     {document['remote']}: {document['url']}{identity}{clear}")
    behind, upload = document["behind"], document["upload"]
    if behind is not None:
        _print_behind(behind)
    if document["problem"]:
        _say(f"problem    {shown_text(document['problem'])}", fg="yellow")
    if upload is None:
        _say(
            "upload     no process has uploaded yet; ciuic remote upload, or ciuic service install",
            fg="yellow",
        )
    else:
        _print_upload(upload)
    for training in document["trainings"]:
        _print_training(training)
    _print_drill(document["last_drill"])
    if "contact" in document:
        _print_contact(document["contact"])


def _print_behind(behind: dict[str, Any]) -> None:
    if behind["newest"]:
        _say(
            f"stored     {plural(behind['stored'], 'snapshot')}, the newest {behind['newest']} "
            f"at {times.clock_of(behind['newest_time'])}"
        )
    else:
        _say("stored     no snapshot", fg="yellow")
    if not behind["snapshots"]:
        _say("behind     by nothing")
        return
    text = (
        f"behind     by {plural(behind['snapshots'], 'snapshot')}, about {human_size(behind['size_bytes'])}"
    )
    if behind["seconds"]:
        text += f"; work that only this host has: {human_duration(behind['seconds'])}"
    _say(text)


def _print_upload(upload: dict[str, Any]) -> None:
    if not upload["running"]:
        why = f"; its last error: {shown_text(upload['waits_for'])}" if upload["waits_for"] else ""
        _say(f"upload     not running since {times.clock_of(upload['time'])} or later{why}", fg="yellow")
    elif upload["waits_for"]:
        _say(
            f"upload     running, pid {upload['pid']}; waits: {shown_text(upload['waits_for'])}", fg="yellow"
        )
    else:
        _say(f"upload     running, pid {upload['pid']}, {human_size(upload['bytes_per_second'])}/s")
    if upload["other_writers"]:
        _say(
            f"writers    {plural(1 + upload['other_writers'], 'log')} for this repository: another host with a copy of this "
            "disk, or an earlier state of this one (nothing is to be done: `prune --remote` ends its log after 30 days); each has "
            "a retention of its own",
            fg="yellow",
        )
    if upload["last_snapshot"]:
        _say(
            f"           last {shown_text(upload['last_snapshot'])}, within {human_duration(upload['last_seconds'])}"
        )
    requests = ", ".join(f"{count} {shown_text(kind)}" for kind, count in upload["requests"].items())
    if requests:
        price = "" if upload["price"] is None else f"; price of the requests: {upload['price']:.6g}"
        _say(
            f"requests   {requests}; {human_size(upload['sent_bytes'])} sent, "
            f"{human_size(upload['received_bytes'])} received{price}"
        )


def _print_training(training: dict[str, Any]) -> None:
    stored, local = training["stored"], training["local"]
    name = shown_text(training["training"])
    here = "none" if local is None else "step unknown" if local["step"] is None else f"step {local['step']}"
    if stored is None:
        _say(f"resume     {name}: nothing to resume from here (local: {here})", fg="yellow")
        return
    is_behind = local is not None and local["snapshot"] != stored["snapshot"]
    _say(
        f"resume     {name}: a resume from here would start at step {stored['step']} (local: {here})",
        **({"fg": "yellow"} if is_behind else {}),
    )


def _print_drill(drill: dict[str, Any] | None) -> None:
    if drill is None:
        _say("last drill never: ciuic remote drill proves that a rescue works")
        return
    when = f"last drill {times.clock_of(drill['time'])}"
    if drill["verdict"] != "good":
        _say(f"{when}: {drill['verdict'].upper()}: {shown_text(drill['reason'])}", fg="red")
        return
    _say(
        f"{when}: good, {plural(drill['files'], 'file')}, {human_size(drill['bytes_read'])} "
        f"within {human_duration(drill['seconds'])}; all of it would take about {human_duration(drill['estimated_seconds'])}"
    )


def _print_contact(contact: dict[str, Any]) -> None:
    if "error" in contact:
        _say(f"contact    {shown_text(contact['error'])}", fg="red")
        return
    month = "" if contact["price_month"] is None else f"; price of a month: {contact['price_month']:.6g}"
    _say(
        f"contact    opened in {contact['open_seconds']:.2g} s, id {contact['id']}, "
        f"made {times.clock_of(contact['created'])}; keys: {', '.join(contact['slots']) or 'none'}"
    )
    for server in contact["servers"]:
        allowed = "objects are only added" if server["append_only"] else "objects are added and deleted"
        _say(
            f"           {server['url']}: ciuic {shown_text(server['program'][:_MAX_SHOWN])} serves "
            f"{shown_text(server['directory'][:_MAX_SHOWN])}; {allowed}"
        )
    _say(f"           {human_size(contact['size_bytes'])} stored{month}")
    for space in contact["spaces"]:
        if space["snapshots"] or space["packs"]:
            whose = "shared" if space["id"] == contact["id"] else f"repository {space['id']}"
            hosts = ", ".join(space["hosts"])
            _say(
                f"           {whose}: {plural(space['snapshots'], 'snapshot')} of {hosts or 'no host'}, "
                f"{human_size(space['size_bytes'])} in {plural(space['packs'], 'pack')}"
            )


# Time after which the configuration is read again for a place of the repository.
_AGAIN_SECONDS = 5.0
_LOOK_SECONDS = 0.2


@click.command("upload", cls=FrameCommand)
@click.option("--once", is_flag=True, help="End when the remotes have everything.")
@click.option(
    "--again",
    multiple=True,
    metavar="ID",
    type=ID,
    help="Also this snapshot, which `ciuic forget --remote` gave up; may be repeated.",
)
def upload(once: bool, again: tuple[str, ...]) -> None:
    """Send snapshots to the configured remotes, in the foreground, until SIGTERM.

    It needs to read the repository, and nothing of the daemon. Exit code 3 means that no remote is configured. A repository
    that does not exist yet is waited for.
    """
    from ciuic.remote.replication import run
    from ciuic.repository import Repository

    session = current()
    config = session.config
    if not config.remotes:
        raise NotFound("no remote is configured", hint="ciuic remote init URL makes one")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # Under nohup a closed terminal is no reason to end.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: stop.set())
    place = session.repository_dir if once else _repository_dir(session, stop)
    if place is None:
        return
    try:
        wanted = _ids(session, again)
        if not once:
            run(config, place, labels=_labels_of, again=wanted, stop=stop)
            return
        with _shown(session, config):
            run(
                config,
                place,
                labels=_labels_of,
                once=True,
                again=wanted,
                stop=stop,
                tell=_Waits(session).tell,
            )
        if stop.is_set() and not Repository.exists(place):
            return
        # Also after a signal: the exit code says whether anything is left to upload.
        _require_all(session, config)
        _say_sent(config)
    except NotFound as error:
        # Exit code 3 has one meaning for those who start this process.
        raise CiuicError(error.message, hint=error.hint) from error


def _ids(session: Session, texts: tuple[str, ...]) -> list[str]:
    return [str(session.repository.snapshots.resolve(text)) for text in texts]


def _repository_dir(session: Session, stop: threading.Event) -> Path | None:
    """Return where the repository is or will be; wait while no directory is protected. None after SIGTERM."""
    told = False
    while not stop.is_set():
        try:
            return session.repository_dir
        except ConfigError as error:
            # With roots the configuration says something that cannot be.
            if session.config.roots:
                raise
            if not told:
                note(f"{error.message}; waiting until a directory is protected")
                told = True
        stop.wait(_AGAIN_SECONDS)
        session = Session(
            config_option=session.config_option,
            repo_option=session.repo_option,
            trust_option=session.trust_option,
        )
    return None


@contextmanager
def _shown(session: Session, config: Config) -> Iterator[None]:
    """Show how much was sent of what the remotes lacked at the beginning, from the notes of the upload."""
    from ciuic.cli.shared.progress import progress

    with progress("upload") as reporter:
        if not reporter.shows:
            yield
            return
        total_bytes = sum(lag.size_bytes for lag in _lags(session, config).values())
        done = threading.Event()

        def watch() -> None:
            while not done.wait(_LOOK_SECONDS):
                sent_bytes = sum(status.sent_bytes for status in _own_statuses(config))
                # What is sent is not known before: less where the remote has it, more for tables and seals.
                reporter.update(bytes_done=sent_bytes, bytes_total=max(total_bytes, sent_bytes))

        thread = threading.Thread(target=watch, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


class _Waits:
    """Says what an upload waits for, each reason of a remote once, and when it goes on."""

    def __init__(self, session: Session) -> None:
        # The session of a command is known to its own thread alone.
        self._say = complain if session.verbosity >= 0 else lambda text: None
        self._lock = threading.Lock()
        self._told: set[tuple[str, str]] = set()
        self._waiting: set[str] = set()

    def tell(self, name: str, text: str) -> None:
        """Take what a remote waits for; an empty text: nothing."""
        # What comes before is the request, of which each has a name of its own.
        reason = (name, text.partition(": ")[2] or text)
        with self._lock:
            if not text:
                if name in self._waiting:
                    self._waiting.discard(name)
                    self._say(f"the upload to {name} goes on")
            elif reason not in self._told:
                self._told.add(reason)
                self._waiting.add(name)
                self._say(f"the upload to {name} waits, and tries again: {shown_text(text)}")


def _own_statuses(config: Config) -> list[UploadStatus]:
    """Return what this process has noted of its uploads."""
    from ciuic.protocol.stored_remotely import upload_state_dir
    from ciuic.remote.upload_status import read_status

    found = [read_status(remote.name, upload_state_dir()) for remote in config.remotes]
    return [status for status in found if status is not None and status.pid == os.getpid()]


def _say_sent(config: Config) -> None:
    """Say that nothing is missing, and what was sent."""
    statuses = _own_statuses(config)
    requests = sum(sum(status.requests.values()) for status in statuses)
    sent = human_size(sum(status.sent_bytes for status in statuses))
    names = ", ".join(remote.name for remote in config.remotes)
    note(f"{names}: everything is stored; {sent} sent, {plural(requests, 'request')}")


def _lags(session: Session, config: Config) -> dict[str, RemoteLag]:
    """Return how far each remote is behind, by its name."""
    from ciuic.protocol.stored_remotely import remote_lag

    repository = session.repository
    infos = repository.snapshots.list()
    return {
        remote.name: remote_lag(remote, repository.id, infos, now_ns=time.time_ns())
        for remote in config.remotes
    }


def _require_all(session: Session, config: Config) -> None:
    """Raise Partial if a remote still lacks snapshots that it wants, such as ones that cannot be read."""
    lags = _lags(session, config)
    lacking = [
        f"{name} lacks {plural(lag.snapshots, 'snapshot')}" for name, lag in lags.items() if lag.snapshots
    ]
    if lacking:
        raise Partial(
            f"not everything was uploaded: {', '.join(lacking)}",
            hint="what was interrupted, or taken meanwhile, goes with the next run; ciuic verify says which snapshots cannot be read",
        )


def _labels_of(repository: Repository, snapshot: Snapshot) -> Labels:
    from ciuic.remote.uploader import Labels

    if not snapshot.is_state:
        return Labels()
    # Half a second and 20 MiB, which most hosts never need: their snapshots are of files.
    from ciuic.training.remote.uploads import labels_of

    return labels_of(repository, snapshot)
