"""What happens in a run: requests from prefill to decode, clients that cannot be trusted, engines that are killed.

Enters: engines and the likelihood of faults. Leaves: calls to engines, and how each request ended.
"""
