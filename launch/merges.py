"""How a run's trainers merged: `python launch/merges.py RUN`."""

from adloco_dist.tools.merges import main

if __name__ == "__main__":
    main()
