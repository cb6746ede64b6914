"""What happened in a run, on a page: `python launch/report.py RUN`."""

from adloco_dist.command import run_command

if __name__ == "__main__":
    run_command("adloco_dist.report.write")
