"""Purifiers by name; each is a member of the contract in `diffpure.purify`."""
