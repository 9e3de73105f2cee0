"""What the process of the tests must be like, and the programs that they start.

Torch keeps to one thread: tiny models are slower with several, and much slower where other programs run too. The
variable is read when torch is imported. SIGINT is not ignored, as it is in what a shell runs in the background.
"""

import os
import signal

os.environ["OMP_NUM_THREADS"] = "1"
signal.signal(signal.SIGINT, signal.default_int_handler)
