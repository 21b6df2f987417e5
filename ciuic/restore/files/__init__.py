"""Workers of a restore: each restores one kind of file, through descriptors that no other user can redirect.

The package may import the model of a restore, and neither the plan, the walk nor the run. Its layers, from the top: links; large and
small; non_directory; pool and targets; content, directory_handles and special; operations on single files.
"""
