"""A fleet on a Ray cluster: engines and the router are deployments of Ray Serve, which places and restarts them.

Enters: the settings of a Serve application, or those of `kvferry up --on ray`. Leaves: deployments whose replicas run
`kvferry serve` and `kvferry route`, and how many there are to be. It knows no request and no cache.
"""
