"""One thread for torch, in tests and in the programs they start: tiny models are slower with several.

Much slower where other programs run too. The variable is read when torch is imported.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
