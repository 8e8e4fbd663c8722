"""LatencyPrism: tells workload from fault in LLM serving, from outside."""

__version__ = "0.2.0"
