"""Real processes and real hosts on one machine, for tests and benchmarks."""
