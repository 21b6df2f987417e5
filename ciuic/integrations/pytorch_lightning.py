"""Lightning (`pytorch_lightning`): a `CheckpointIO` over a `SnapshotManager`, and a callback that saves by its policy.

    io = SnapshotCheckpointIO("./snapshots", every_steps=500, max_snapshots=10)
    trainer = Trainer(plugins=[io], callbacks=[SnapshotCallback(io)])
    trainer.fit(model, resumable(DataLoader(…)), ckpt_path=io.latest())

Guarantees: what any `ModelCheckpoint` saves is a snapshot as well, at whose path stands which one it is; it is held until Lightning removes
it. The callback's own snapshots are taken after a step, or after an epoch with its validation, and the random generators come back with them.
With a loader that has a state (`resumable`, `StatefulDataLoader`) a run that is resumed within an epoch is the same to the bit.

Not here: strategies that save in parts (FSDP, DeepSpeed). `ciuic.integrations.lightning` is the same for the other name of the package.
"""

from __future__ import annotations

from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from pytorch_lightning.callbacks import Checkpoint

from ciuic.integrations.lightning_parts import InStore, Saves, resumable

__all__ = ["SnapshotCallback", "SnapshotCheckpointIO", "resumable"]


class SnapshotCheckpointIO(InStore, TorchCheckpointIO):  # type: ignore[misc, unused-ignore]
    """For `Trainer(plugins=[…])`."""


class SnapshotCallback(Saves, Checkpoint):  # type: ignore[misc, unused-ignore]
    """For `Trainer(callbacks=[…])`; Lightning calls it after all other callbacks."""
