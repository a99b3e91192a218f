"""Who sends which box to whom. Depends on shapes only: no address, no block, no byte stride."""
