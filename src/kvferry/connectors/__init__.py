"""Engines: what stands between each of them and the agent of its rank.

Enters: calls of an engine's own interface. Leaves: calls of the public API, `import kvferry`, and of nothing else that
is inside. A folder imports its own engine only, and only when that is there.
"""
