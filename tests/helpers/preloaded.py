"""What forked ranks find imported for most tests, and never look through for garbage (processes.py)."""

import gc

import helpers.plain
import helpers.refusals
import helpers.resuming  # noqa: F401

gc.collect()
gc.freeze()  # else every rank's first collections look through all that was imported
