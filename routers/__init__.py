"""Routers obey commands: the control-topic consumer and one adapter a router."""
