"""Numbered SQL files and what applies them; the same on a server and on the embedded store."""
