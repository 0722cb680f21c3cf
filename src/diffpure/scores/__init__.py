"""Score models: one contract, one network a file."""

from diffpure.diffusion.score import EpsilonScore, GaussianScore, ScoreModel
from diffpure.scores.denoiser import DenoiserScore
from diffpure.scores.load import load_score

__all__ = ["DenoiserScore", "EpsilonScore", "GaussianScore", "ScoreModel", "load_score"]
