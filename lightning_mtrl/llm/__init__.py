"""Language models behind an OpenAI-compatible server: asking them, counting, remembering, reading JSON."""
