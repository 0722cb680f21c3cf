"""Certificates by randomised smoothing: a smoothed model, and runs of images with the radius of each."""
