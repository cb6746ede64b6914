"""The steps of a round, named as in docs/architecture.md, "A round"; they alone start collectives on tensors."""
