"""The ladder: one submission a file, one idea apart."""
