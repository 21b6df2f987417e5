"""Helpers without any state of a training: name lock, documents, memory, costs, signals, randomness.

The package imports nothing else of the training library.
"""
