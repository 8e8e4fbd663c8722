"""``latencyprism demo``: the main job on two simulated replicas, told as a story."""

from latencyprism.demo.run import run_demo

__all__ = ["run_demo"]
