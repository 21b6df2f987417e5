"""Tiers of a remote: move packs to colder storage classes by age and kind, and thaw what a restore needs.

Invariants:

* Only data packs become cold. Logs, manifests, packs of trees and block maps, keys and remote.json never do, so that snapshots
  can be listed, shown and compared, and their structure verified, at once.
* A copy of a pack's table is below ``tables/`` before the pack becomes cold, so that an index can be made from the bucket alone.
* A pack becomes cold only if every snapshot that needs any of its chunks is as old, and of the kind, that the rule says.
  It never becomes warmer again by a rule; new snapshots may rely on it.
* A mover is a writer: which packs move is in its log before the first one does. A collection whose fence follows spares them, and a
  mover leaves out what a round before has condemned (`WriterLog.move`). So nothing that was deleted comes back by a late copy.
* An object keeps its name and its bytes when it moves within a store, so that readers find it all the time.

The room may import every other room of ciuic.remote.

References:
    docs/decisions/tiers.md; docs/remote-format.md, sections 2 and 6
"""
