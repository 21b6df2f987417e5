"""States of snapshots in the formats of others: files and folders that programs without ciuic open.

Nothing of a snapshot is executed, and what is written has no pickle beyond what `torch.load(weights_only=True)`
opens. The package may import loading, `dcp` and the floors below; each framework is imported when it is used.
"""
