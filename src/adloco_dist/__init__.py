"""AdLoCo as a real torch.distributed launcher: a pool of DiLoCo trainers over torchrun ranks."""

__version__ = "0.1.0"
