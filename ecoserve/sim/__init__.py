"""A discrete-event simulator of LLM serving, at the level of engine iterations.

It runs the very objects of ``ecoserve.policy`` on cost models of real hardware, beside the systems
that they are measured against.
"""
