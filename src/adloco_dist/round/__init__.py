"""The steps of a round, named as in docs/architecture.md, "A round"; the only users of collectives on tensors."""
