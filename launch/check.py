"""What the nodes of a run stand on: `torchrun ... launch/check.py`, or alone for this machine."""

from adloco_dist.launch.check import main

if __name__ == "__main__":
    main()
