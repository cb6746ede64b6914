"""Sweeps: every combination of the settings' values is a run of its own."""
