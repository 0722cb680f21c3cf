"""Score models: one contract, one network a file."""

from diffpure.scores.base import EpsilonScore, GaussianScore, ScoreModel, discrete_epsilon

__all__ = ["EpsilonScore", "GaussianScore", "ScoreModel", "discrete_epsilon"]
