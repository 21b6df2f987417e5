"""File operations on the backing directory, with dirty tracking, for any driver.

`OverlayCore` is the interface that drivers use. Cuts and the life of epochs are here too. The package may import state and the floors
below.
"""
