"""The command line, one verb a file. Nothing here imports torch before a verb runs, so that --help stays fast."""
