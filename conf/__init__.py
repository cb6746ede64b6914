"""Hydra's config groups; a package, so that an installed wheel finds them as pkg://adloco_dist.conf."""
