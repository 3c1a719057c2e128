"""Ids, frozen records, protocols, clock and errors: what every layer speaks. Standard library and msgspec only."""
