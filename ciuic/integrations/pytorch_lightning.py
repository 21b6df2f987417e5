"""Lightning (`pytorch_lightning`): a `CheckpointIO` over a `SnapshotManager`, and a callback that saves.

    io = SnapshotCheckpointIO("./snapshots", every_steps=500, max_snapshots=10)
    trainer = Trainer(plugins=[io], callbacks=[SnapshotCallback(io)])
    trainer.fit(model, resumable(DataLoader(…)), ckpt_path=io.latest())

Guarantees: a checkpoint that any `ModelCheckpoint` saves is a snapshot, and the file at its path names it;
the snapshot is held until Lightning removes the checkpoint. When `fit` has ended the best and the last one are
files that torch and Lightning open without ciuic (``materialize``). The callback's own snapshots are taken after a
step, or after an epoch with its validation, and include the random generators. With a loader that has a state
(`resumable`, `StatefulDataLoader`) a run that is resumed within an epoch is the same to the bit.

Not supported: strategies that shard the state (FSDP, DeepSpeed). `ciuic.integrations.lightning` is the same
for the other name of the package.
"""

from __future__ import annotations

from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from pytorch_lightning.callbacks import Checkpoint

from ciuic.integrations.lightning_parts import SnapshotCallbackBase, SnapshotIOBase, resumable

__all__ = ["SnapshotCallback", "SnapshotCheckpointIO", "resumable"]


class SnapshotCheckpointIO(SnapshotIOBase, TorchCheckpointIO):  # type: ignore[misc, unused-ignore]
    """Plugin for `Trainer(plugins=[…])`."""


class SnapshotCallback(SnapshotCallbackBase, Checkpoint):  # type: ignore[misc, unused-ignore]
    """Callback for `Trainer(callbacks=[…])`; Lightning calls it after all other callbacks."""
