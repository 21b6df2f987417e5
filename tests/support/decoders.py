"""Map of modules that decode bytes from possibly hostile sources to their readers (`support.readers`).

A module with a decoding call that is not here fails tests/unit/project/test_fuzz_targets.py: a new decoder
needs a reader, or the reason why no other user writes its input.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

TOP: Final = Path(__file__).parents[2]
_CALL: Final = re.compile(
    r"msgspec\.(json|msgpack)\.(decode|Decoder)|json\.loads?\(|\.unpack(_from)?\(|iter_unpack\(|int\.from_bytes\("
    r"|pickletools\.genops\(|tomllib\.|decode_(json|msgpack)\(|(json|msgpack)_decoder\(|sqlite3\.connect\("
)

READERS: Final[dict[str, tuple[str, ...]]] = {
    "ciuic/protocol/pairing.py": ("question of a trainer", "question of a job", "answer to a trainer"),
    "ciuic/remote/objects/pipe_protocol.py": ("frame of a pipe", "request over a pipe", "reply over a pipe"),
    "ciuic/repository/config.py": ("config", "config with a key"),
    "ciuic/repository/index_database.py": ("index",),
    "ciuic/repository/locks.py": ("owner of a lock",),
    "ciuic/repository/pack_format.py": (
        "pack header",
        "segment table",
        "segment table payload",
        "footer",
        "footer payload",
    ),
    "ciuic/repository/byte_planes.py": ("planes", "difference in planes"),
    "ciuic/repository/byte_planes_math.py": ("planes", "difference in planes"),
    "ciuic/repository/record_files.py": ("promise of a snapshot", "note of a restore"),
    "ciuic/repository/snapshot_format.py": (
        "snapshot",
        "snapshot payload",
        "marks payload",
        "marks file",
    ),
    "ciuic/repository/tree_format.py": ("tree leaf", "tree node", "link table", "attributes"),
    "ciuic/artefacts/folder.py": ("manifest of an artefact",),
    "ciuic/config/repository_mark.py": ("mark of a repository",),
    "ciuic/restore/attributes.py": ("access ACL",),
    **dict.fromkeys(
        (
            "ciuic/verdicts/formats/safetensors.py",
            "ciuic/verdicts/formats/zip_archive.py",
            "ciuic/verdicts/formats/npy.py",
            "ciuic/verdicts/formats/hdf5.py",
            "ciuic/verdicts/formats/hdf5.py",
            "ciuic/verdicts/formats/pickles.py",
            "ciuic/verdicts/not_finite.py",
        ),
        ("checkpoint that is judged",),
    ),
    "ciuic/verdicts/formats/tensor_bundle.py": ("directory that is judged",),
    "ciuic/verdicts/checkpoint_directories.py": ("directory that is judged",),
    "ciuic/restore/journal.py": ("mark of a restore",),
    "ciuic/maintenance/verify.py": ("pass of a scrub",),
    "ciuic/training/stored_tensors.py": ("tensors of a training", "safetensors header"),
    "ciuic/training/tensor_files.py": (
        "tensors of a safetensors file",
        "tensors of an archive of torch",
        "tensors of an archive of NumPy",
    ),
    "ciuic/training/dcp/metadata.py": ("DCP metadata", "pointer to a DCP checkpoint"),
    "ciuic/training/dcp/reading.py": ("state of a training",),
    "ciuic/training/json_documents.py": ("state of a training", "safetensors header", "DCP metadata"),
    "ciuic/training/format/layout.py": ("safetensors header",),
    "ciuic/training/writer/messages.py": ("message of a trainer to its writer",),
    "ciuic/training/inert_pickle.py": ("pickle that is read as data",),
    "ciuic/training/ranks.py": ("message of a rank",),
    "ciuic/training/loading_sets.py": ("parts that a rank tells of", "safetensors header"),
    "ciuic/training/format/stored_files.py": ("safetensors header",),
    "ciuic/training/format/structure.py": ("state of a training",),
    "ciuic/training/format/reading.py": (
        "state of a training",
        "facts of a training",
        "tensors that a state needs",
        "safetensors header",
    ),
    "ciuic/training/writer_process.py": ("manifest of a save",),
    "ciuic/protocol/heartbeat_page.py": ("heartbeat page",),
    "ciuic/protocol/span_spool.py": ("span of a snapshot",),
    "ciuic/protocol/known_damage.py": ("record of damage",),
    "ciuic/protocol/last_drill.py": ("record of a drill", "records of drills"),
    "ciuic/daemon/snapshots/space_watch.py": ("history of space",),
    "ciuic/number_files.py": ("lines with numbers", "TensorBoard events"),
    "ciuic/daemon/trainers/loss_watch.py": ("numbers that were read",),
    "ciuic/protocol/stored_remotely.py": ("record of a remote",),
    "ciuic/daemon/service.py": ("request for a snapshot",),
    "ciuic/cli/commands/web/broker.py": ("order of the page", "question of the page"),
    "ciuic/daemon/capture/job.py": ("capture job", "capture message"),
    "ciuic/daemon/preemption.py": ("line of a notice",),
    "ciuic/daemon/jobs.py": (
        "job of upkeep",
        "job of a drill",
        "job of verdicts",
        "job of numbers",
        "job of notices",
    ),
    "ciuic/daemon/roots/view_process.py": ("job of a view",),
    "ciuic/daemon/verdicts.py": ("verdicts on a snapshot",),
    "ciuic/verdicts/records.py": ("record of verdicts",),
    "ciuic/daemon/trainers/registry.py": ("watched trainers",),
    "ciuic/daemon/trainers/watch.py": ("hello of a trainer",),
    "ciuic/protocol/worker_frames.py": ("control frame",),
    "ciuic/fuse_layer/core/overlay_core.py": ("saved tracking",),
    "ciuic/fuse_layer/kernel/driver.py": ("request of the kernel",),
    "ciuic/fuse_layer/fuse_protocol.py": ("request of the kernel", "security contexts"),
    # Its archive is a file of root in the state directory, of records that were checked before.
    "ciuic/fuse_layer/journal/inherited_session.py": ("session journal of a worker",),
    "ciuic/fuse_layer/journal/records.py": ("session journal of a worker",),
    "ciuic/fuse_layer/sealed_format.py": ("sealed file",),
    "ciuic/fuse_layer/undo_format.py": ("undo log",),
    "ciuic/remote/documents.py": (
        "log entry of a remote",
        "manifest of a remote",
        "round of a remote",
        "plan of a set",
        "mark of a set",
        "remote.json",
        "remote.json of a repository",
    ),
    # Its key is in a directory of the uploader's own.
    "ciuic/remote/host_status.py": ("status of a host",),
    "ciuic/remote/pack.py": ("pack of a remote", "table of a remote's pack"),
    "ciuic/remote/sealing/key_slots.py": ("key slot", "recovery key"),
    "ciuic/remote/sealing/sealer.py": ("object of a remote",),
}
"""Map from module to the readers that reach its decoders."""

OURS: Final[dict[str, str]] = {
    "ciuic/remote/objects/pipe_server.py": "the count of a served directory, which this server keeps in it (16 bytes)",
    "ciuic/exporter/traces.py": "a note in a directory of this user's own",
    "ciuic/training/tensor_history.py": "a cache in a directory of this user's own",
    "ciuic/daemon/base/notify_process.py": "the daemon, through a pipe",
    "ciuic/remote/sealing/passphrase_key.py": "the parent process, through a pipe",
    "ciuic/lazy/filesystem.py": "requests, written by the kernel",
    "ciuic/view/filesystem.py": "requests, written by the kernel",
    "ciuic/lazy/changes.py": "a file of root in a directory that only root may enter",
    "ciuic/lazy/service.py": "a file of root in a directory that only root may enter",
    "ciuic/lazy/progress.py": "files of root in the runtime directory",
    "ciuic/remote/access.py": "random bytes of this process",
    "ciuic/training/remote/upload_process.py": "an argument that the trainer gives its own process",
    "ciuic/remote/writer_log.py": "a file in a directory of the uploader's own",
    "ciuic/remote/upkeep/brake.py": "a file in the cache of the collector, which is this user's own",
    "ciuic/remote/log_reader.py": "a cache in a directory of the uploader's own",
    "ciuic/maintenance/references.py": "numbers of names that treeformat has checked",
    "ciuic/maintenance/chunkset.py": "ids of chunks",
    "ciuic/protocol/control.py": "answers of the daemon, which is root",
    "ciuic/compare/diff.py": "numbers of names that treeformat has checked",
    "ciuic/integrations/checkpoint_pointer.py": "a pointer file that the user of the training names",
    "ciuic/training/convert/foreign_files.py": "documents of a folder that the user imports, as far as they are no safetensors",
    "ciuic/system/io_throttle.py": "a figure that a worker, which is root, has published",
    "ciuic/protocol/peer_socket.py": "credentials, written by the kernel",
    "ciuic/system/unix_sockets.py": "credentials, written by the kernel",
    "ciuic/system/processes.py": "an answer of the kernel",
    "ciuic/repository/extent_sharing.py": "an answer of the kernel",
    "ciuic/system/spill.py": "a new file without a name",
    "ciuic/protocol/state_directory.py": "an answer of the kernel",
    "ciuic/training/name_lock.py": "an answer of the kernel",
    "ciuic/system/cloud_notices.py": "the machine's provider, whose word ends the machine anyway",
    "ciuic/training/writer/rank_parts.py": "files of the user's own other ranks",
    "ciuic/training/writer/codecs.py": "the trainer's own memory",
    "ciuic/remote/objects/credentials.py": "files and programs of the operator, and the metadata of the machine's provider",
    "ciuic/protocol/watch_client.py": "answers of the daemon, which is root",
    "ciuic/cli/probes.py": "what our own child has encoded",
    "ciuic/cli/commands/web/__init__.py": "answers of the page, which a process of this user's or of root's started",
    "ciuic/cli/commands/web/front.py": "answers of the broker, which started this process",
    "ciuic/cli/commands/web/front_process.py": "the parent process, through a pipe",
    "ciuic/cli/commands/web/access.py": "the broker, which started this process, through a socket pair",
    "ciuic/cli/commands/web/look_process.py": "the parent process, through a pipe",
    "ciuic/cli/commands/web/live.py": "answers of the broker, which started this process",
    "ciuic/training/state_import.py": "what our own child has encoded, and the order that it was given",
    "ciuic/cli/fast_snapshot.py": "answers of the daemon, which is root",
    "ciuic/cli/shared/safety_snapshot.py": "lines of our own child",
    "ciuic/daemon/capture/entries.py": "what the same process has encoded",
    "ciuic/daemon/capture/walk.py": "what the same process has encoded",
    "ciuic/cli/commands/slurm.py": "what a command of ours prints",
    "ciuic/daemon/peer_server.py": "a socket pair between processes of root",
    "ciuic/daemon/peer_receiver.py": "a socket pair between processes of root, and our own command line",
    "ciuic/config/owed_snapshots.py": "a file of root beside the configuration, in a directory of root",
    "ciuic/daemon/base/runtime.py": "files of root in a directory of root",
    "ciuic/daemon/base/child_processes.py": "the daemon, on our standard input",
    "ciuic/daemon/drills.py": "what our own child has encoded",
    "ciuic/daemon/upkeep.py": "what our own child has encoded",
    "ciuic/operator/agent.py": "what our own child has encoded",
    "ciuic/fuse_layer/tracking/changes.py": "bits that undo_format has checked",
    "ciuic/fuse_layer/pyfuse3_driver.py": "the kernel's first request, of a fixed form",
    "ciuic/fuse_layer/kernel/session.py": "the head of a request and the first one, of fixed forms, written by the kernel",
    "ciuic/fuse_layer/state/open_rules.py": "a file of root in the state directory; whatever cannot be read is as good as absent",
    "ciuic/fuse_layer/prefork/client.py": "a socket pair between processes of root",
    "ciuic/fuse_layer/prefork/messages.py": "a socket pair between processes of root",
    "ciuic/fuse_layer/system/syscalls.py": "an answer of the kernel",
    "ciuic/system/mountinfo.py": "an answer of the kernel",
    "ciuic/restore/destination.py": "flags of a file, an answer of the kernel",
}
"""Map from module to the writer of what it decodes, where that is no attacker."""


def modules_that_decode() -> set[str]:
    """Return the paths of decoding modules, from the top of the checkout."""
    return {
        path.relative_to(TOP).as_posix()
        for path in (TOP / "ciuic").rglob("*.py")
        # structs.py decodes what others give it.
        if path != TOP / "ciuic/structs.py" and _CALL.search(path.read_text())
    }
