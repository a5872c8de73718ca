"""Stage 0: what is wanted. pins/<release>/stack.toml, typed, frozen and validated."""
