"""The driver that speaks the kernel's FUSE protocol itself, with passthrough.

The package may import everything below but pyfuse3: core, the control server, journal and the layers under them.
"""
