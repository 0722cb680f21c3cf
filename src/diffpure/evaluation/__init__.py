"""Honest evaluation: rows first, every number a view of them, and a run that can be killed and checked."""
