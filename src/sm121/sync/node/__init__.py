"""What runs on a node, in a Python that has nothing but the standard library.

These modules are sent over ssh as text and run there (sm121.sync.agent), so they may import only
the standard library and one another.
"""
