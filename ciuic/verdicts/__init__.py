"""Verdicts on checkpoints: GOOD, TORN or UNKNOWN, each with its reason.

`verdict` judges a file, or a directory with its index or marker, through a source that reads ranges (`sources`). Nothing is
executed or unpickled, and everything that is read may be hostile: memory and reads are bounded. The package may import the
repository and `ciuic.system`.
"""
