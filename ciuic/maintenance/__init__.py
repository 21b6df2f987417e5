"""Maintenance of a whole repository: prune, check, repair, verify and scrub.

Each operation is a function of an open repository, called by commands, the daemon and the training writer. The package may
import the repository, restore, compare and `ciuic.system`, and no user interface.
"""
