"""Gradients of a run's model, and their noise: `python launch/analyze_gradients.py RUN`, or under torchrun."""

from adloco_dist.launch.analyze import main

if __name__ == "__main__":
    main()
