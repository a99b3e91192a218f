"""The commands: a folder for each, whose `command.py` has its options and imports the rest when the command runs.

Enters: words of a command line. Leaves: data on stdout, words on stderr, an exit code. Commands build objects, call the
packages below and print; they decide nothing about caches or requests. `server` is what those share that serve HTTP;
`ray` runs them on a Ray cluster.
"""
