"""The wheelhouse to the nodes: send, install, compare, switch, roll back. See docs/sync.md.

In the order in which data flows: `hosts` (who, and how ssh gets there), `roles` (head, worker), `release` (what is sent),
`agent` and `node/` (the two ends of the talk with a node), `streams` and `transfer` (rsync),
`deploy` (all of it, in order), `compare` (do the nodes run the same bytes?).
"""
