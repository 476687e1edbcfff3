"""The public functions and classes of modtrace: they put together what the lower packages do."""
