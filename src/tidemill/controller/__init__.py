"""The controller: the loop, the ledger and its policies. Plain asyncio over core protocols; no torch, no threads."""
