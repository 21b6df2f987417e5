"""Durable files: atomic replacement, ordered syncs, locks, a reserve of free space, write-behind.

Everything that reaches a disk goes through `operations`, so that tests can cut the power at any of them. The
package may import ciuic.system and the ids and errors of the repository.
"""
