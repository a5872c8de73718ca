"""Profile `overlay`: the release's own wheel, with our Python-only patches over its Python."""
