"""FlashInfer's JIT modules, compiled on the build host and packed as the JIT cache that it looks for.

For others: `open_workshop(context)`, then `workshop.write_specs(modules)`, then
`compile_specs(workshop, specs, ...)`.
"""
