"""What people look at: a run, or several, on one page."""
