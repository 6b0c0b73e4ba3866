"""What speculation is worth, and how it is chosen: costs, acceptance, the choice. No torch."""
