"""Hold an exported program against the checkpoint that it was made of, by running both."""
