#!/bin/sh
# Epilog of Slurm: takes a last snapshot of the directory that ciuic-prolog.sh has protected, and stops protecting it (docs/slurm.md).
# In slurm.conf:
#
#   Epilog=/etc/slurm/ciuic-epilog.sh
#
# An Epilog that fails drains its node. This one fails never: it logs; with CIUIC_SLURM_STRICT=1 it does.
# CIUIC_SLURM_SECONDS: how long it may take at most. CIUIC: the program.
set -u
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
rm -f "${CIUIC_SLURM_NOTES:-/run/ciuic-slurm}/${SLURM_JOB_ID:-}" 2>/dev/null
said=$(timeout "${CIUIC_SLURM_SECONDS:-300}" ${CIUIC:-ciuic} slurm epilog 2>&1 </dev/null)
code=$?
if [ "$code" -ne 0 ]; then
    logger -t ciuic-slurm -p user.err -- "epilog of job ${SLURM_JOB_ID:-?} failed ($code): $said" 2>/dev/null
    [ "${CIUIC_SLURM_STRICT:-0}" != 1 ] || exit 1
fi
exit 0
