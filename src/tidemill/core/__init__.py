"""Ids, frozen records, protocols, clock and errors: what every other layer speaks. Standard library and msgspec only."""
