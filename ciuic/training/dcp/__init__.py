"""Storage of torch.distributed.checkpoint in a ciuic repository.

The package may import saving and the floors below, and torch.
"""
