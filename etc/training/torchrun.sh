#!/bin/bash
# Elastic training on 2 to 8 hosts: ranks that die are started again, a host that is lost is left out, one that comes is taken in
# (docs/snapshot-manager.md, "Elastic jobs").
#
#   RDZV=head.example:29400 RUN=run-7 bash torchrun.sh          on every host, and on a spare when one is lost
#
# In train.py, after torch.distributed.init_process_group():
#
#   from ciuic import SnapshotManager
#   from ciuic.training import BeforePreemption
#   manager = SnapshotManager("/local/snapshots", every_steps=500, save_when=[BeforePreemption(grace_seconds=25)],
#                             max_snapshots=5, remote="s3://bucket/team/run-7")
#   manager.register(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
#   resumed = manager.resume()

set -eu
# Where agents find each other: a port on a host that is not lost with the training, where this runs:
#   python -c 'import time; from torch.distributed import TCPStore; s = TCPStore("0.0.0.0", 29400, is_master=True, wait_for_workers=False); time.sleep(1e9)'
: "${RDZV:?host:port where agents find each other}" "${RUN:?name of the run}"
# Ranks of each round find each other in a store of that round. In the one that agents keep, new ranks find addresses of dead ones,
# fail to connect, and are started once more.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# A lost host is noticed after 3 beats of 2 seconds (torchrun's own: 15 seconds), and a round begins 5 seconds after the last host
# has come (torchrun's own: 30).
# No more hosts than MAX: with one that is too many torchrun 2.13 may start ranks again and again.
exec torchrun --nnodes=2:8 --nproc-per-node="${GPUS:-8}" --max-restarts=100 --monitor-interval=1 \
    --rdzv-backend=c10d --rdzv-endpoint="$RDZV" --rdzv-id="$RUN" \
    --rdzv-conf=is_host=0,last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=3 \
    train.py "$@"
