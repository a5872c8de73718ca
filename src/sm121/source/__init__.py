"""Stage 1: pristine upstream as git commits, whoever provides it."""
