"""Cuts: the life of epochs, and copies at one instant of files that the kernel writes past the worker.

The package may import state and the floors below.
"""
