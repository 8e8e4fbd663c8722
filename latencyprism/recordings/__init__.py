"""Recordings: telemetry kept in files, fed through the streams again and scored."""
