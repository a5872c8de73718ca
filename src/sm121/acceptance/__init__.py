"""What an owner of two Sparks runs once: every step that needs the hardware, and a table of what
passed, failed, and was not run with the reason (docs/acceptance.md)."""
