"""Gradient noise: what single sequences disagree by, measured on a few chunks, and the batch that it asks for."""
