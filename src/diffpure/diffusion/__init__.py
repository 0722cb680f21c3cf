"""The diffusion core: schedules, the score contract, one step of each equation, samplers, and gradient modes."""
