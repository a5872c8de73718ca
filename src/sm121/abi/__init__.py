"""Stage 8: prove that binaries fit, with no GPU and without the machine they are for.

In the order in which data flows: `archive` and `scan` turn wheels or an environment into
facts (`elf`, `fatbin`), which are cached by content; the checks (`symbols`, `paths`,
`floors`, `coverage`, `sets`, `patches`) compare facts with `policy`, which is data;
`verify` puts them together into a `report`; `table`, `page` print it.
"""
