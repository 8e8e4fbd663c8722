"""From telemetry to verdicts: windows, stages, detection and sculpting; Faust only at the edge."""
