"""A directory for the search path of Python, where ``determined`` is found in the place of the real one."""
