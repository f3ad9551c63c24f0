"""What devices take badly in a program, each lint with what it finds."""
