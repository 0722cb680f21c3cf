"""Every protocol is usable as it stands and says where it comes from."""

from __future__ import annotations

import pytest
import torch
from diffpure.experiments.protocols import PROTOCOLS

from diffpure.purifiers.diffusion import Purifier
from diffpure.scores import GaussianScore


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_protocol_makes_a_purifier_and_states_its_source(name: str) -> None:
    protocol = PROTOCOLS[name]
    purifier = Purifier(GaussianScore(0.0, 0.25), protocol.sampler, protocol.gradient)
    assert purifier(torch.rand(1, 3, 4, 4), seeds=[0]).shape == (1, 3, 4, 4)
    assert purifier.approximate_gradient == (protocol.gradient != "exact")
    assert protocol.attacks
    assert protocol.rules
    assert all(len(text) > 20 for text in (protocol.source, protocol.reported, protocol.departs))
    assert len(protocol.subset.unique()) == 504


def test_the_papers_protocol_is_the_papers() -> None:
    paper = PROTOCOLS["paper"]
    assert paper.threat.eps == 8 / 255
    assert paper.minimum
    assert paper.seeds == (121, 122, 123)
    assert [attack.name for attack in paper.attacks] == ["apgd-ce+apgd-dlr", "apgd-ce+apgd-t+fab-t+square"]
