"""How instances come into the router's pool, and leave it: they register, a file lists them, or a cluster has them.

Enters: announcements, a file, what Kubernetes says of pods. Leaves: instances that the pool is to add or to remove. It
knows no request and no policy.
"""
