"""What people look at before and after a run."""
