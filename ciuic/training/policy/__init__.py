"""Rules of when to save and what to keep, and when a save is due by them."""
