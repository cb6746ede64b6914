"""What of a record differs between two runs that are the same."""

CLOCKS = (
    "seconds", "data_seconds", "elapsed_seconds", "rank_seconds", "utilisation", "resources", "bytes_sent", "plan",
    "worth",
)  # fmt: skip
"""Times, and what is measured or counted by time; a plan holds the seconds that have passed."""
