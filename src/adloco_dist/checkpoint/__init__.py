"""Checkpoints: state out and in, their files, copies on other nodes, and where a run resumes."""
