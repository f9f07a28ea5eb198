"""The programs, a module for each theme."""
