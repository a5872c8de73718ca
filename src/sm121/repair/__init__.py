"""Stage 5: what pip breaks, made right. Wheels before they go into the wheelhouse, and
environments on a node, brought back to it offline.
"""
