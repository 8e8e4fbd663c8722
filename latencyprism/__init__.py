"""LatencyPrism: tells workload from fault in LLM serving, from outside."""

__version__ = "0.1.0"
