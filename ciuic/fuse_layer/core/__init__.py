"""File operations on the backing directory, for any driver, with and without dirty tracking.

`PassthroughCore` is the interface that drivers use: its groups of operations. `OverlayCore` adds tracking and the life of epochs. The package
may import `state` and the layers below it.
"""
