"""A model's `config.json`, field by field; none of it is trusted."""
