"""What happens once before the first round: preflight checks, placement, probes."""
