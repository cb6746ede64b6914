"""For all tests.

No GPU is seen here, on machines that have some: the commands would start one rank on each, where these tests count on
what they do without, and results on the CPU are compared to the last bit. What needs a GPU is checked by gpu/test.py.
"""

import os
import signal

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything asks CUDA, which looks once

# Commands that the tests start inherit what is ignored here: under nohup, or in the background of a script, they would
# not hear of the signals that are tried on them.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
