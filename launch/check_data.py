"""Look at what a run would be trained on: `python launch/check_data.py key=value ...`."""

from adloco_dist.tools.check_data import main

if __name__ == "__main__":
    main()
