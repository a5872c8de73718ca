"""Source-build and patch pipeline for vLLM on NVIDIA DGX Spark (GB10, sm_121).

The sub-packages, in the order in which data flows:
pins, source, patches, lock, toolkit, compile, wheelhouse.
"""

import os

__version__ = "0.1.0"

# GitPython runs git when it is imported, and raises ImportError if there is none; ours is a
# message of its own (gitrepo).
os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
