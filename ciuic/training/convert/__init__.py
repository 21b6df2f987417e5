"""States in the formats of others: files and folders that programs without ciuic open, written and read.

Nothing of a snapshot or of a file is executed. What is written has no pickle beyond what
`torch.load(weights_only=True)` opens; files of torch are read with ``weights_only=True``, and the metadata of
`torch.distributed.checkpoint`, a pickle, is interpreted as data (`inert_pickle`). Each framework is imported when it is
used.
"""
