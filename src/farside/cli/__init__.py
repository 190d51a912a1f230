"""The command line: one module per noun, imported only when its command runs."""
