"""Load for an OpenAI server, and what it did to it: arrivals, prompts, answers, figures, a page."""
