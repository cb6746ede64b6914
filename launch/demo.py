"""Two machines on a slow link beside one alone and beside DistributedDataParallel: `python launch/demo.py`."""

from adloco_dist.command import run_command

if __name__ == "__main__":
    run_command("adloco_dist.launch.demo")
