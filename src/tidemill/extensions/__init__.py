"""User functions that extend Tidemill: finding, identifying, checking and calling them."""
