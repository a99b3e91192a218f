"""A fleet on a Ray cluster: engines and the router are deployments of Ray Serve, which places and restarts them."""
