"""Proof that a plan's layouts and programs do what they must, in every interleaving."""

from tide.compiler.verify.proof import Proof, verify

__all__ = ["Proof", "verify"]
