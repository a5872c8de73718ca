"""Stage 2: the patch series, applied as commits with stable ids."""
