"""The figures that farside is held to: one module a figure, `make bench` runs them all."""
