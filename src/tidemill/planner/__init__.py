"""Plans: memory, placement, weight transfer, overlap, staleness and run time, each number with formula and source."""
