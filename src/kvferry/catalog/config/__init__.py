"""A model's `config.json`, field by field.

Enters: JSON that nobody has checked. Leaves: checked values, and the names of fields that nobody knows. It does not
know what layers make of them.
"""
