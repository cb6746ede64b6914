"""Train: `python launch/train.py key=value ...` on this machine, or under torchrun on any number of nodes."""

from adloco_dist.command import run_command

if __name__ == "__main__":
    run_command("adloco_dist.launch.driver")
