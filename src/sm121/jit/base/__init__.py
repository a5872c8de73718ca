"""Stages `jit-tree` and `jit-env`: the patched vLLM as Python, and what it runs in."""
