"""Checking runs: from their rows alone, from their files, and with the model and the images at hand."""
