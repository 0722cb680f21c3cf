"""Defend an image classifier with a diffusion model, and find out honestly how robust it then is."""

__version__ = "0.1.0"
