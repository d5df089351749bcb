"""Where this package meets a host library: one module for each host."""
