"""What the method is compared with: DistributedDataParallel."""
