"""Helpers of the tests: tiny real wheels, ELF files, git repositories and servers."""
