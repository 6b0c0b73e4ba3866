"""The verbs of the command that belong to the laboratory, one a file. Nothing here imports torch before a verb runs."""
