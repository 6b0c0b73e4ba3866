"""Which settings suit the traffic: recorded or replayed texts, predicted and measured speed, the recommendation."""
