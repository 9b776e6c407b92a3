"""The sub-commands, one module each: docstring = description, `main(arguments)` = the work.

None of them imports a model library while it is loaded, so that help stays quick.
"""
