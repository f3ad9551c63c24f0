"""What can be asked of each stage: one frozen model each, read by recipes, command line and API."""
