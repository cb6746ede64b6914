"""Evaluate a finished run: `python launch/evaluate.py RUN`."""

from adloco_dist.command import run_command

if __name__ == "__main__":
    run_command("adloco_dist.tools.evaluate")
