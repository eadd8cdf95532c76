"""Attention with its exchanges: kernel adapters, the serial and the fused path, and their torch operators."""
