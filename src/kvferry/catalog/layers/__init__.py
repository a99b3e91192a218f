"""What each kind of layer keeps of a token or of a request.

Enters: checked fields of a config. Leaves: tensors of the cache, and the work of a layer per token. A kind of layer
knows no other kind.
"""
