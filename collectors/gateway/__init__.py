"""Requests as gateways in front of the servers log them: nginx, HAProxy, Envoy."""
