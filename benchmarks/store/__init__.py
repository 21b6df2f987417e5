"""`make bench-store`: ciuic beside restic, borg and cp, as their users run them."""
