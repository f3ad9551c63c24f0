"""Text: sources, tokens, packed rows and their order, for training, calibration and evaluation."""
