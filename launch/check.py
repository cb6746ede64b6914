"""What the nodes of a run stand on: `torchrun ... launch/check.py`, or alone for this machine."""

from adloco_dist.command import run_command

if __name__ == "__main__":
    run_command("adloco_dist.launch.check")
