"""Objects of a program: their states, the boundaries of steps, the position in the data, and whether a state is complete."""
