"""What an engine asks its agent for, checked where it asks."""
