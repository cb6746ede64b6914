"""`python -m adloco_dist.launch`: what the driver lets torchrun start."""

from adloco_dist.command import run_command

if __name__ == "__main__":
    run_command("adloco_dist.launch.driver")
