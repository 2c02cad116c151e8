"""The folder of the pipeline that `tidegate demo` runs. Nothing else is in it: Python's workers look for modules there,
and one that is called as one of the standard library would be taken for that."""
