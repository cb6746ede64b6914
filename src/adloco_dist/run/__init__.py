"""What lasts: the run directory, its records, the final model; and what the user sees meanwhile."""
