"""Index of a remote: which pack has which chunk, kept on this host and rebuilt from the bucket alone.

Guarantee: what it says is stored was in a pack of the bucket when that was last listed, and no round that this process
has read condemned it since. The room may import format, sealing, objects and ciuic.repository.
"""
