"""File operations on the backing directory, with dirty tracking, for any driver.

`OverlayCore` is the interface that drivers use. The package may import cut, state and the floors below.
"""
