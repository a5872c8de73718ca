"""Stage 6: the result. One folder for one stack, target and profile, that says what is in it."""
