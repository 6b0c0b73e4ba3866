"""Preflight and explanation: does speculation fit a target, what is it worth here, and what limits it?"""
