"""The parts that models are made of, each with its formula and where it comes from."""
