"""The laboratory: proofs, benchmarks, trainings and other tools around the engine. The engine imports nothing of it."""
