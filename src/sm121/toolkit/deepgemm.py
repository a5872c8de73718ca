"""DeepGEMM's host library uses CPython's full API, so it is for one CPython: which one is here?"""

from __future__ import annotations

import os

from sm121.context import Context
from sm121.errors import CompilerMissing
from sm121.index import uv_binary
from sm121.toolkit.python import Interpreter, find_interpreter

COMPONENT = "_deep_gemm_C"


def deepgemm_python(context: Context) -> Interpreter:
    """The CPython whose headers DeepGEMM is compiled with: of the version that the target runs,
    whichever one the rest is built with.

    Raises CompilerMissing if this machine has none with headers.
    """
    wanted = context.runtime.python
    others = {name: value for name, value in os.environ.items() if name != "SM121_PYTHON"}
    for environment in (os.environ, others):
        try:
            return find_interpreter([wanted], environment=environment)
        except CompilerMissing as missing:
            fault = missing
    raise CompilerMissing(
        f"No CPython {wanted} with headers was found, which DeepGEMM is compiled for.",
        cause=f"its library is for one CPython, and {context.options.target} runs {wanted}; {fault.cause}",
        remedy=f"Install CPython {wanted} with its headers and put python{wanted} on PATH "
        f"(`{uv_binary().name} python install {wanted}` does both), or build another profile.",
    ) from fault
