"""For all tests."""

import signal

# Commands that the tests start inherit what is ignored here: under nohup, or in the background of a script, they would
# not hear of the signals that are tried on them.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
