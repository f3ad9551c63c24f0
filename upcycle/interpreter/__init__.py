"""Run a saved Core ML program in torch, on any machine."""
