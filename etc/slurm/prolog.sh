#!/bin/sh
# Prolog of Slurm: protects the directory that a job names, and restores it where it is empty (docs/slurm.md). In slurm.conf:
#
#   Prolog=/etc/slurm/ciuic-prolog.sh
#   PrologFlags=Alloc
#   TaskProlog=/etc/slurm/ciuic-task-prolog.sh
#
# A job names it so, and it must belong to the job's user:   sbatch --comment=ciuic=/data/run job.sh
#
# A Prolog that fails drains its node. This one fails never: it logs, and the job runs unprotected, which its log says; with CIUIC_SLURM_STRICT=1 it does.
# What a user has named wrongly is no failure: it is a line in the log of the job, by ciuic-task-prolog.sh.
# CIUIC_SLURM_SECONDS: how long it may take at most. CIUIC: the program. CIUIC_SLURM_NOTES: what it has said, a file for each job.
set -u
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
said=$(timeout "${CIUIC_SLURM_SECONDS:-300}" ${CIUIC:-ciuic} slurm prolog 2>&1 </dev/null)
code=$?
if [ "$code" -ne 0 ]; then
    logger -t ciuic-slurm -p user.err -- "prolog of job ${SLURM_JOB_ID:-?} failed ($code): $said" 2>/dev/null
    [ "${CIUIC_SLURM_STRICT:-0}" != 1 ] || exit 1
    # Only a job that names a directory misses something. Slurm from 23.02 on gives the comment.
    case " ${SLURM_JOB_COMMENT-$(timeout 20 squeue -h -t all -j "${SLURM_JOB_ID:-0}" -o %k 2>/dev/null)}" in
        *" ciuic="*) said="the directory that the job names may be unprotected: the prolog failed ($code), as the log of the node says" ;;
        *) said= ;;
    esac
fi
if [ -n "$said" ]; then
    umask 022
    notes=${CIUIC_SLURM_NOTES:-/run/ciuic-slurm}
    { mkdir -p "$notes" && printf '%s\n' "$said" >"$notes/$SLURM_JOB_ID"; } 2>/dev/null
fi
exit 0
