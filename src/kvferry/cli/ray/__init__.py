"""A fleet on a Ray cluster: engines and the router are deployments of Ray Serve, which places, restarts and scales them."""
