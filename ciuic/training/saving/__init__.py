"""Saves from the moment they are due until they are staged and handed to the writer.

The package may import writer, device, ranks, state and the floors below.
"""
