"""The process beside the trainer that stores staged states, applies retention and outlives the trainer.

Both ends live here: the client in the trainer, and the parts of the process. The package may import protocol,
policy, format and `util`.
"""
