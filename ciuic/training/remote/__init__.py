"""Remotes of a training: where its snapshots go besides the local directory, and where a new host finds them.

The local directory is first: a save is durable there, and a process of its own uploads from there.
"""
