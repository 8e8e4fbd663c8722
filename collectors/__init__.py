"""Sources that watch inference servers from outside, and the agent that runs them."""
