"""What each kind of layer keeps of a token or of a request."""
