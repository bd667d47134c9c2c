"""The routes that OpenAI's clients speak to."""
