"""Lightning training that resumes by itself: run it, kill it, run it again.

python examples/lightning_fit.py [directory for snapshots]
"""

import sys

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from ciuic.integrations.lightning import SnapshotCallback, SnapshotCheckpointIO, resumable

save_dir = sys.argv[1] if len(sys.argv) > 1 else "./snapshots"


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(32, 2)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.layers(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


lightning.seed_everything(1)
x = torch.rand(80, 8)
loader = DataLoader(TensorDataset(x, (x.sum(1) > 4).long()), batch_size=8, shuffle=True)
model = Classifier()
io = SnapshotCheckpointIO(save_dir, every_steps=4, max_snapshots=10)
trainer = lightning.Trainer(
    max_epochs=3,
    accelerator="cpu",
    plugins=[io],
    callbacks=[SnapshotCallback(io)],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, resumable(loader), ckpt_path=io.latest())
print("trained to step", trainer.global_step)
