"""verify-jit: compile what a node would compile at its first start, here and for its GPU.

discover   what kernels the DeepSeek-V4 path has, from vLLM's source
recipes    pins/<release>/jit.toml: shapes, what is not compiled and why, limits, readings
tree       the patched vLLM as a Python package, and the environment it runs in
inside/    what runs in that environment: vLLM's own launch code, with nothing launched
drive      those runs in child processes, with time limits
cubin      registers, shared memory, target of what came out
verify     all of it, into one report
"""
