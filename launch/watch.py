"""The page of a run in a browser, while it trains: `python launch/watch.py RUN`."""

from adloco_dist.command import run_command

if __name__ == "__main__":
    run_command("adloco_dist.report.watch")
