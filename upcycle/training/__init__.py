"""Uptraining: a short run that heals a converted checkpoint, with the source as its teacher."""
