"""What the process of the tests must be like, and the programs that they start.

Torch keeps to one thread: tiny models are slower with several, and much slower where other programs run too. The
variable is read when torch is imported. SIGINT is not ignored, as it is in what a shell runs in the background.
Where no GPU can run a kernel, Triton's interpreter does. It must be told before Triton is imported, by whatever test.
"""

import os
import signal

os.environ["OMP_NUM_THREADS"] = "1"
signal.signal(signal.SIGINT, signal.default_int_handler)

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
