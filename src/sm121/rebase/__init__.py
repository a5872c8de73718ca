"""Move a patch series to another upstream, and say of every hunk what became of it.

The order of the modules is the order in which data flows: `releases` and `onto` find the new
upstream, `hunks` and `verdict` judge one patch, `walk` the series, `session` and `resolve` carry
it with a person's help, `drift` and `propose` say what else must change, `accept` writes it.
"""
