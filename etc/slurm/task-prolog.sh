#!/bin/sh
# TaskProlog of Slurm: prints into the log of a job what ciuic-prolog.sh has said about its directory (docs/slurm.md). In slurm.conf:
#
#   TaskProlog=/etc/slurm/ciuic-task-prolog.sh
#
# It runs as the user of the job. The first task of a node speaks for it.
if [ "${SLURM_LOCALID:-0}" = 0 ]; then
    sed 's/^/print ciuic: /' "${CIUIC_SLURM_NOTES:-/run/ciuic-slurm}/$SLURM_JOB_ID" 2>/dev/null
fi
exit 0
