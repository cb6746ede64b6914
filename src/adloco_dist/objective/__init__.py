"""What is computed: the module, and the sum of its losses over targets."""
