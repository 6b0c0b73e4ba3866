"""The HTTP server: OpenAI's completions and chat completions, with the names of vLLM beside them."""
