"""OpenAI's requests, responses and errors, and the few fields that states add."""
