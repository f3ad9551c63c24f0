"""What stages share of a model that runs: loading, attention, losses, generation."""
