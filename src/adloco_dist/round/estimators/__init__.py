"""Gradient statistics of a trainer from the first update of a round, when its workers stand at the anchor or beside it.

An estimator's watchers see every worker's first gradient while it is accumulated. After the inner phase the estimator
exchanges what they kept; the trainer's lowest rank then knows the statistics (docs/theory.md, "What is measured").
"""
