"""What the server keeps of the texts of namespaces that allow it, as data for trainings."""
