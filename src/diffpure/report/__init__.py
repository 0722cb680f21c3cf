"""Rows and arrays in, pictures and pages out; nothing here imports torch."""
