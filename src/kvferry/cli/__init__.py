"""Commands: each builds objects, calls the public API and prints. Data goes to stdout, words to stderr."""
