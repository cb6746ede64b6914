"""Ranks that come and go: who is there, and outer steps with whoever is."""
