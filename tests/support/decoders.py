"""Which modules decode bytes that somebody else may have written, and the reader that stands for each (`support.readers`).

A module with a decoding call that is not here fails tests/unit/test_fuzz_targets.py: whoever adds a decoder adds a reader, or says
why nobody else writes what it reads.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

TOP: Final = Path(__file__).parents[2]
_CALL: Final = re.compile(
    r"msgspec\.(json|msgpack)\.(decode|Decoder)|json\.loads?\(|\.unpack(_from)?\(|iter_unpack\(|int\.from_bytes\("
    r"|tomllib\.|decode_json\(|sqlite3\.connect\("
)

READERS: Final[dict[str, tuple[str, ...]]] = {
    "ciuic/pairing.py": ("question of a trainer", "answer to a trainer"),
    "ciuic/repository/config.py": ("config",),
    "ciuic/repository/index.py": ("index",),
    "ciuic/repository/lock.py": ("owner of a lock",),
    "ciuic/repository/packformat.py": (
        "pack header",
        "segment table",
        "segment table payload",
        "footer",
        "footer payload",
    ),
    "ciuic/repository/planes.py": ("planes", "difference in planes"),
    "ciuic/repository/lanes.py": ("planes", "difference in planes"),
    "ciuic/repository/note_files.py": ("promise of a snapshot", "note of a restore"),
    "ciuic/repository/snapformat.py": ("snapshot", "snapshot payload", "marks payload", "marks file"),
    "ciuic/repository/treeformat.py": ("tree leaf", "tree node", "link table", "attributes"),
    "ciuic/repository_mark.py": ("mark of a repository",),
    "ciuic/restore/attributes.py": ("access ACL",),
    "ciuic/restore/journal.py": ("mark of a restore",),
    "ciuic/scrub_book.py": ("pass of a scrub",),
    "ciuic/training/dcp_metadata.py": ("DCP metadata",),
    "ciuic/training/dcp_reading.py": ("state of a training",),
    "ciuic/training/documents.py": ("state of a training", "safetensors header", "DCP metadata"),
    "ciuic/training/layout.py": ("safetensors header",),
    "ciuic/training/messages.py": ("message of a trainer to its writer",),
    "ciuic/training/rank_messages.py": ("message of a rank",),
    "ciuic/training/reading.py": ("state of a training", "facts of a training"),
    "ciuic/training/structure.py": ("state of a training",),
    "ciuic/training/writer_process.py": ("manifest of a save",),
    "ciuic/watch_page.py": ("heartbeat page",),
    "daemon/api.py": ("request for a snapshot",),
    "daemon/capture_job.py": ("capture job", "capture message"),
    "daemon/upkeep_process.py": ("job of upkeep",),
    "daemon/watch_book.py": ("watched trainers",),
    "daemon/watch_socket.py": ("hello of a trainer",),
    "fuse_layer/control_frames.py": ("control frame",),
    "fuse_layer/epochs.py": ("saved tracking",),
    "fuse_layer/kernel_driver.py": ("request of the kernel",),
    "fuse_layer/kernel_handles.py": ("request of the kernel",),
    "fuse_layer/kernel_protocol.py": ("request of the kernel", "security contexts"),
    "fuse_layer/ledger.py": ("ledger of a worker",),
    "fuse_layer/name_changes.py": ("ledger of a worker",),
    "fuse_layer/sealed_format.py": ("sealed file",),
    "fuse_layer/undo_format.py": ("undo log",),
}
"""Module → readers that reach its decoders."""

OURS: Final[dict[str, str]] = {
    "ciuic/blame.py": "numbers of names that treeformat has checked",
    "ciuic/chunkset.py": "ids of chunks",
    "ciuic/control.py": "answers of the daemon, which is root",
    "ciuic/diff.py": "numbers of names that treeformat has checked",
    "ciuic/integrations/lightning_parts.py": "a pointer file that the user of the training names",
    "ciuic/pace.py": "a figure that a worker, which is root, has published",
    "ciuic/peer_socket.py": "credentials, written by the kernel",
    "ciuic/processes.py": "an answer of the kernel",
    "ciuic/repository/sharing.py": "an answer of the kernel",
    "ciuic/repository/walk.py": "numbers of names that treeformat has checked",
    "ciuic/spill.py": "a new file without a name",
    "ciuic/state_directory.py": "an answer of the kernel",
    "ciuic/training/alone.py": "an answer of the kernel",
    "ciuic/training/notices.py": "the machine's provider, whose word ends the machine anyway",
    "ciuic/training/parts.py": "files of the user's own other ranks",
    "ciuic/training/twins.py": "the trainer's own memory",
    "ciuic/watch_client.py": "answers of the daemon, which is root",
    "cli/quick.py": "answers of the daemon, which is root",
    "cli/safety.py": "lines of our own child",
    "daemon/capture_base.py": "what the same process has encoded",
    "daemon/capture_place.py": "what the same process has encoded",
    "daemon/peer_messages.py": "a socket pair between processes of root",
    "daemon/peer_receiver.py": "our own command line",
    "daemon/runtime.py": "files of root in a directory of root",
    "daemon/terms.py": "the daemon, on our standard input",
    "daemon/upkeep.py": "what our own child has encoded",
    "fuse_layer/blockset.py": "bits that undo_format has checked",
    "fuse_layer/control_client.py": "credentials, written by the kernel",
    "fuse_layer/control_server.py": "credentials, written by the kernel",
    "fuse_layer/init_handshake.py": "the kernel's first request, of a fixed form",
    "fuse_layer/kernel_negotiation.py": "the kernel's first request, of a fixed form",
    "fuse_layer/kernel_session.py": "the head of a request, written by the kernel",
    "fuse_layer/ledger_archive.py": "a file of root in the state directory, of records that the ledger has checked",
    "fuse_layer/open_rules.py": "a file of root in the state directory; whatever cannot be read is as good as absent",
    "fuse_layer/standby.py": "a socket pair between processes of root",
    "fuse_layer/standby_service.py": "a socket pair between processes of root",
    "fuse_layer/syscalls.py": "an answer of the kernel",
}
"""Module → who writes what it decodes, where that is no attacker."""


def modules_that_decode() -> set[str]:
    """Paths from the top of the checkout."""
    found = set()
    for folder in ("ciuic", "daemon", "cli", "fuse_layer"):
        for path in sorted((TOP / folder).rglob("*.py")):
            name = path.relative_to(TOP).as_posix()
            if not name.startswith(("ciuic/daemon/", "ciuic/cli/", "ciuic/fuse_layer/")) and _CALL.search(
                path.read_text()
            ):
                found.add(name)
    return found
