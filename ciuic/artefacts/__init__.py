"""Files of a snapshot as artefacts of other tools, one module for each form (docs/export.md).

An artefact is a folder that later exports bring up to date: what did not change is neither read nor written again.
May import the library and readers of tensors; knows nothing of the daemon and the command line.
"""
