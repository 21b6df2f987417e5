"""Replication: local snapshots to a remote, in a process of its own.

Guarantees: a snapshot is committed on the remote only when everything it refers to is stored there; whatever
is interrupted goes on at the next object; the local repository is only read. Nothing that the job or a capture does
waits for it.
"""
