"""The maths on AttentionWeights: pure functions that know nothing of files and names."""
