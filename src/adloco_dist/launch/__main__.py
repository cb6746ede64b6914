"""`python -m adloco_dist.launch`: what the driver lets torchrun start."""

from adloco_dist.launch.driver import main

if __name__ == "__main__":
    main()
