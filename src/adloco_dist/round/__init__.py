"""The steps of a round, named as in the design; the only users of collectives on tensors."""
