"""Model instances and the share of every trainer that lives on this rank."""
