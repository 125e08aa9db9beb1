"""A worker: vLLM's OpenAI server, the instance scheduler in its engine, an agent beside it."""
