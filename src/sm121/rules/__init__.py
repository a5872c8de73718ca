"""What is known about sets of distributions: pins/rules.toml, and one engine that evaluates it.

`lock`, `repair`, `verify-abi` and `doctor` all ask here; none has rules of its own.
"""
