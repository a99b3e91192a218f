"""The half in each vLLM worker: it owns the rank's agent and reports what has ended.

Enters: metadata of the scheduler's half, the worker's tensors and steps. Leaves: leases and fetches of the agent, and
requests that are done, or failed with their blocks. It chooses nothing: the scheduler's half does.
"""
