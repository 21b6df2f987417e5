"""DistributedDataParallel, resumed by itself: run it, kill it, run it again.

    torchrun --nproc-per-node 2 examples/ddp.py [directory for snapshots]

The first rank saves; at the start it reads the newest good snapshot and hands it to the others, so that all agree on it.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ciuic import SnapshotManager

save_dir = sys.argv[1] if len(sys.argv) > 1 else "./snapshots"
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
x = torch.rand(80, 8)
dataset = TensorDataset(x, (x.sum(1) > 4).long())
sampler = DistributedSampler(dataset, shuffle=True, seed=1)  # its order follows from the epoch
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

manager = SnapshotManager(save_dir, max_snapshots=10) if rank == 0 else None
found = [manager.load_latest_snapshot() if manager else None]
dist.broadcast_object_list(found, src=0)
state = found[0]
start_epoch = 0
if state is not None:
    model.load_state_dict(state["model_state_dict"])
    optimizer.load_state_dict(state["optimizer_state_dict"])
    start_epoch = state["epoch"] + 1

parallel = DistributedDataParallel(model)
for epoch in range(start_epoch, 4):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(parallel(inputs), targets).backward()
        optimizer.step()
    if manager:  # the others go on meanwhile; they wait for this rank in the next gradient at the latest
        manager.save_snapshot(model, optimizer, epoch)
if manager:
    manager.close()
    weights = torch.cat([value.flatten() for value in model.state_dict().values()])
    print(f"trained epochs {start_epoch} to 3, weights {weights.double().sum():.17g}")
dist.destroy_process_group()
