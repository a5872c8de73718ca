"""What is right and wrong, as data (`default.toml`) and lists; `model` is its schema."""
