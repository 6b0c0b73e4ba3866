"""Structured output: grammars, the automata made of them, and the trial of untrusted grammars."""
