"""Pure tensor functions: advantages, losses, KL, log-probs, packing. They need torch only."""
