"""Strict, frozen configuration: pydantic models, TOML files, dotted overrides."""
