"""Where a pipeline's rows become visible: the contract of a sink, and the sinks that come with Tidegate."""
