"""Scrapes the metrics page of inference servers under one set of names."""
