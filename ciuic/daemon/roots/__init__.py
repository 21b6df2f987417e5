"""Protected roots: worker, mount and session of each, and recovery when one of them is gone.

The package may import `base`.
"""
