"""Linux interfaces that ciuic uses: mounts, priorities, the page cache, processes, free space, extended attributes.

Nothing here knows what a snapshot is. The package may import retention, errors, types and units, and nothing else of ciuic.
"""
