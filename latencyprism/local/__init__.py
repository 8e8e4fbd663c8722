"""Programs that a machine without a cluster runs for itself, ended with the process that asked."""
