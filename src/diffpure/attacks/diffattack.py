"""DiffAttack (Kang et al. 2023): APGD that also raises the deviation of the reverse path from the forward one.

The part that is attacked is the defence with a second output, the deviation of its purifier along the path; what is
found is evaluated on the defence itself.
"""

from __future__ import annotations

from typing import Any, Final, final

from torch import Tensor, nn

from diffpure.attacks.apgd import APGD
from diffpure.attacks.compose import Transfer
from diffpure.attacks.expectation import EOT
from diffpure.errors import InputError
from diffpure.noise import Seeds


@final
class Deviating(nn.Module):
    """A defence that also says how far its reverse path is from the forward one: images → (logits, deviation)."""

    title = "defence and the deviation of its path"

    def __init__(self, defence: Any, states: int = 4) -> None:
        super().__init__()
        if states < 1 or not hasattr(getattr(defence, "purifier", None), "deviation"):
            raise InputError("DiffAttack needs one state or more, and a defence with a diffusion purifier.")
        self.defence = defence
        self.states = states

    @property
    def stochastic(self) -> bool:
        """As the defence is."""
        return bool(self.defence.stochastic)

    def parts(self) -> dict[str, object]:
        """Those of the defence."""
        found: dict[str, object] = self.defence.parts()
        return found

    def with_gradient(self, gradient: Any) -> Deviating:
        """The same with another gradient mode."""
        return Deviating(self.defence.with_gradient(gradient), self.states)

    def forward(self, images: Tensor, seeds: Seeds = None) -> tuple[Tensor, Tensor]:
        """Logits (B, classes) and deviations (B,), of a vote the mean over its draws."""
        rows, drawn = self.defence.drawn(images, seeds)
        purified, deviation = self.defence.purifier.deviation(rows, drawn, states=self.states)
        return self.defence.decide(self.defence.classify(purified)), deviation.reshape(len(images), -1).mean(1)


DIFFATTACK: Final = Transfer(label="diffattack", attack=APGD(loss="deviated", eot=EOT(20)), part=Deviating, eot=EOT(20))
