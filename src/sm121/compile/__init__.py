"""Stage 5: vLLM's own setup.py, CMake and ninja, driven; never a copy of them."""
