"""Source-build and patch pipeline for vLLM on NVIDIA DGX Spark (GB10, sm_121).

The sub-packages, in the order in which data flows:
pins, source, patches, lock, toolkit, compile, wheelhouse.
"""

__version__ = "0.1.0"
