"""One folder per command: `command.py` has its options, and imports the rest when the command runs.

Each builds objects, calls the public API and prints. Data goes to stdout, words to stderr.
"""
