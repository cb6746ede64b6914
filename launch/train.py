"""Train: `python launch/train.py key=value ...` on this machine, or under torchrun on any number of nodes."""

from adloco_dist.launch.driver import main

if __name__ == "__main__":
    main()
