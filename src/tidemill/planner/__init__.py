"""What a run needs and costs, before it is paid for: pure arithmetic on profiles, each number with its derivation."""
