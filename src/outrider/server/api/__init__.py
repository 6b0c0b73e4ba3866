"""OpenAI's API: shapes of requests, what they mean, and the answers."""
