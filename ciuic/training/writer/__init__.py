"""The process beside the trainer that stores staged states, applies retention and outlives the trainer; and its client."""
