"""Where a pipeline's control records are kept: the object store, the paths in it, the manifest."""
