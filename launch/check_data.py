"""Look at what a run would be trained on: `python launch/check_data.py key=value ...`."""

from adloco_dist.command import run_command

if __name__ == "__main__":
    run_command("adloco_dist.tools.check_data")
