"""Ranks, devices, process groups and the control messages between them."""
