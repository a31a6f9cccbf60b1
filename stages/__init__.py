"""What each stage computes."""

import os

# Read when torch is imported. Waiting OpenMP threads that spin cost a machine with other work ten times the CPU:
# 64 rows through SmolLM2's layers on two threads of two busy cores took 42 and 76 s spinning, 3 s sleeping.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
