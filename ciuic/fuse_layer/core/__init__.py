"""File operations on the backing directory, with dirty tracking, for any driver.

`OverlayCore` is the interface that drivers use: its groups of operations, and the life of epochs. The package may import state and the floors
below.
"""
