"""Gradient statistics of a trainer from the first update of a round, when all its workers stand at the anchor.

An estimator's watchers see every worker's first gradient while it is accumulated. After the inner phase the estimator
exchanges what they kept; the trainer's lowest rank then knows the statistics (design, section 3.1).
"""
