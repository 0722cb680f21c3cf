"""Models by name: one kind of card, safe checkpoints, and the weights inside the package."""
