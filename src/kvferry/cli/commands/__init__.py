"""The options of each command. The work is in the module of the same name one folder up, imported when it is needed."""
