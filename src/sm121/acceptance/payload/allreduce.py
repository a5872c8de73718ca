"""All-reduce between two nodes by NCCL, also replayed from a CUDA graph. Run on both by the
release's Python:  - RANK ADDRESS PORT. Prints one line of JSON.
"""

import ctypes
import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

rank, address, port = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.cuda.set_device(0)
dist.init_process_group(
    "nccl", init_method=f"tcp://{address}:{port}", world_size=2, rank=rank,
    timeout=timedelta(seconds=120), device_id=torch.device("cuda:0"),
)  # fmt: skip
COUNT, ROUNDS = 64 << 20, 20
data = torch.ones(COUNT, device="cuda")
dist.all_reduce(data)
right = bool((data == 2).all())
for _ in range(3):
    dist.all_reduce(data)
torch.cuda.synchronize()
start = time.perf_counter()
for _ in range(ROUNDS):
    dist.all_reduce(data)
torch.cuda.synchronize()
seconds = (time.perf_counter() - start) / ROUNDS

# The replay across nodes is what deadlocks with NCCL 2.28.9 (pins/rules.toml).
small = torch.zeros(1 << 16, device="cuda")
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    dist.all_reduce(small)
stream.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=stream):
    small.fill_(1)
    dist.all_reduce(small)
for _ in range(500):
    graph.replay()
torch.cuda.synchronize()
replayed = bool((small == 2).all())

# What is loaded: torch.cuda.nccl.version() says what torch was compiled with.
version = ctypes.c_int()
ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
number = version.value
print(
    json.dumps(
        {
            "right": right, "replayed": replayed,
            # Of two ranks, bus bandwidth is the algorithm's (nccl-tests, PERFORMANCE.md).
            "gbytes_per_s": COUNT * 4 / seconds / 1e9,
            "nccl": f"{number // 10000}.{number // 100 % 100}.{number % 100}",
        }
    )
)  # fmt: skip
dist.destroy_process_group()
