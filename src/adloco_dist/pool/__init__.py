"""Model instances, the share of every trainer that lives on this rank, and the statistics of its gradients."""
