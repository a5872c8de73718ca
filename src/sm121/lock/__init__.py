"""Stage 3: what the pins mean, file by file. pins/<release>/pylock.*.toml (PEP 751).

A committed lock names every file by name, size and sha256, with a path relative to the lock
and no URL: it resolves through whatever index the user has configured.
"""
