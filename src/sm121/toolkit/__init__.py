"""Stage 4: what compiles. A CUDA toolkit out of wheels, the target's torch, the host's Python."""
