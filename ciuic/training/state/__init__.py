"""Objects of a program: their states, the position in the data, and whether a state is complete.

The package may import `util`.
"""
