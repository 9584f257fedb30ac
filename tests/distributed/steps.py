"""What the ranks of a stand-in say to each other."""

STEP, END = 10, 11
STEPS = 40  # of an answer
STEP_S = 0.01
