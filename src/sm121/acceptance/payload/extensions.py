"""Import every extension of the installed vllm, with the real driver. Run by the release's Python.

Prints one line of JSON: the GPU, how many were imported, and what was said of those that were not.
"""

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import torch

found = {"gpu": "", "imported": [], "failed": {}}
if torch.cuda.is_available():
    major, minor = torch.cuda.get_device_capability()
    found["gpu"] = f"{torch.cuda.get_device_name()} {major}.{minor}"
    # A kernel of torch's own, so that the driver has really been used.
    found["sum"] = float(torch.ones(1 << 20, device="cuda").sum())
spec = importlib.util.find_spec("vllm")
root = Path(spec.submodule_search_locations[0])
for file in sorted(root.rglob("*.so")):
    name = ".".join(("vllm", *file.parent.relative_to(root).parts, file.name.split(".")[0]))
    try:
        importlib.import_module(name)
    except ImportError as error:
        # Libraries of operators have no module in them.
        if "dynamic module does not define" not in str(error):
            found["failed"][name] = str(error)
            continue
        try:
            torch.ops.load_library(str(file))
        except Exception as second:
            found["failed"][name] = str(second)
            continue
    except Exception as error:
        found["failed"][name] = f"{type(error).__name__}: {error}"
        continue
    found["imported"].append(name)
print(json.dumps(found))
sys.exit(0)
