"""Why a run's batches were what they were: `python launch/batches.py RUN`."""

from adloco_dist.command import run_command

if __name__ == "__main__":
    run_command("adloco_dist.tools.batches")
