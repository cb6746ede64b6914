"""DiLoCo inside of frameworks that own the training loop; each is imported by its own module alone."""
