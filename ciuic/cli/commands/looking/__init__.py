"""Commands that look at what snapshots have: a path over time, names, changes, checkpoints."""
