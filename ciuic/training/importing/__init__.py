"""States in the formats of others, read into snapshots.

Nothing that was read is executed: files of torch are opened with ``weights_only=True``, and the metadata of
`torch.distributed.checkpoint`, a pickle, is interpreted as data (`inert_pickle`). The package may import the
manager and the floors below.
"""
