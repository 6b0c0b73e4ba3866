"""The playground and the Learn page; their sources are in web/."""
