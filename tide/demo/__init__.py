"""``python -m tide.demo``: a plan of a real model, then TIDE beside FSDP2 between CPU ranks."""
