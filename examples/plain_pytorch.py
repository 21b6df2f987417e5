"""PyTorch training loop that resumes by itself: run it, kill it, run it again.

python examples/plain_pytorch.py [directory for snapshots]
"""

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

from ciuic import SnapshotManager

save_dir = sys.argv[1] if len(sys.argv) > 1 else "./snapshots"
torch.manual_seed(1)
x = torch.rand(80, 8)
loader = DataLoader(TensorDataset(x, (x.sum(1) > 4).long()), batch_size=8, shuffle=True)
model = torch.nn.Sequential(
    torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(32, 2)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)

with SnapshotManager(save_dir, interval="10m", every_steps=4, max_snapshots=10) as manager:
    manager.register(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    resumed = manager.resume()
    for epoch in range(resumed.epoch if resumed else 0, 3):
        for inputs, targets in loader:  # continues after the last saved batch
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            scheduler.step()
        manager.save_snapshot(epoch=epoch)
print("trained to step", manager.step)
