#!/bin/sh
# Prolog of Slurm: protects the directory that a job names, and restores it where it is empty (docs/slurm.md). In slurm.conf:
#
#   Prolog=/etc/slurm/ciuic-prolog.sh
#   PrologFlags=Alloc
#
# A job names it so, and it must belong to the job's user:   sbatch --comment=ciuic=/data/run job.sh
#
# A Prolog that fails drains its node. This one fails never: it logs, and the job runs unprotected; with CIUIC_SLURM_STRICT=1 it does.
# CIUIC_SLURM_SECONDS: how long it may take at most. CIUIC: the program.
set -u
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
said=$(timeout "${CIUIC_SLURM_SECONDS:-300}" ${CIUIC:-ciuic} slurm prolog 2>&1 </dev/null)
code=$?
if [ "$code" -ne 0 ]; then
    logger -t ciuic-slurm -p user.err -- "prolog of job ${SLURM_JOB_ID:-?} failed ($code): $said" 2>/dev/null
    [ "${CIUIC_SLURM_STRICT:-0}" != 1 ] || exit 1
fi
exit 0
