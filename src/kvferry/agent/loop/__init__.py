"""The thread of a rank: it waits for sockets, transports and the engine, and gives each its turn."""
