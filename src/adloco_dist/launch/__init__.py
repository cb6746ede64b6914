"""The commands: a driver that starts torchrun, what each rank does under it, and settings from Hydra."""
