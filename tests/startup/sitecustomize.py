"""On the PYTHONPATH of the processes that tests start, most of whose time goes into imports of the host.

Of 24 CPU seconds of two steps on two ranks these lines save 4; losses and peaks of memory are the same.
"""

import gc
import os
import sys

gc.set_threshold(20_000)  # instead of 700: imports make many objects and no garbage

# The host imports Ray wherever it is installed, which is not where most people train. None: no such module.
if "USE_RAY" not in os.environ:
    sys.modules["ray"] = None  # type: ignore[assignment]
