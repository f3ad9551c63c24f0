"""The source and its candidates on the same held-out text: scores, statistics, margins."""
