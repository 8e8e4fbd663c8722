"""Receives the spans that engines emit of their requests, by OTLP over gRPC and HTTP."""
