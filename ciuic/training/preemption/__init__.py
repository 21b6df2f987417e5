"""Preemption of a run: the last snapshot, and requeueing of the job.

The package may import ranks, protocol and `util`.
"""
