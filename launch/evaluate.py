"""Evaluate a finished run: `python launch/evaluate.py RUN`."""

from adloco_dist.tools.evaluate import main

if __name__ == "__main__":
    main()
