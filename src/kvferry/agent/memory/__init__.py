"""Memory that peers reach: caches, staging memory, the probe; and digests of what lies there."""
