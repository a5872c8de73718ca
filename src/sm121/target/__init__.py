"""Proof by running the target's own Python: a root of the target, entered, and a list of steps."""
