"""Why a run's batches were what they were: `python launch/batches.py RUN`."""

from adloco_dist.tools.batches import main

if __name__ == "__main__":
    main()
