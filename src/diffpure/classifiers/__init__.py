"""Classifiers: images in [0, 1] to logits, one network a file, the normalisation inside."""

from diffpure.classifiers.load import load_classifier

__all__ = ["load_classifier"]
