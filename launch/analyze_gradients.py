"""Gradients of a run's model, and their noise: `python launch/analyze_gradients.py RUN`, or under torchrun."""

from adloco_dist.command import run_command

if __name__ == "__main__":
    run_command("adloco_dist.launch.analyze")
