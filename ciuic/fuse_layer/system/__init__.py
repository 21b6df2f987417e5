"""System calls and facts of the backing file system that the overlay needs and Python lacks.

The package imports nothing else of the overlay.
"""
