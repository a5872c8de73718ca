"""FlashInfer's JIT modules, compiled on the build host and packed as the JIT cache that it looks for.

For others: `prepare.open_workshop(context)`, then `write_specs(modules, ...)` of it, then
`build.compile_specs(workshop, specs, ...)`.
"""
