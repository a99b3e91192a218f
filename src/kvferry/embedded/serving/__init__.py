"""From a checked request to an answer in the OpenAI dialect, streamed or whole."""
