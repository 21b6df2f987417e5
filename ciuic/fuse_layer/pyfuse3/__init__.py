"""The portable driver on libfuse 3, through pyfuse3, an extra of the package.

The package may import core, the control server and the layers below, and nothing of the kernel driver.
"""
