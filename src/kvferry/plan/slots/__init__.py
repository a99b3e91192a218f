"""A request cut into slots of staging memory."""
