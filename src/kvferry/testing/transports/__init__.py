"""The contract of a transport as checks, and peers to play them with."""
