"""Watches OpenAI-compatible traffic in passing: who asked when, and when each token came back."""
