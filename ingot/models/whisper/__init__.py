"""OpenAI's Whisper: what it hears with, and what it writes."""
