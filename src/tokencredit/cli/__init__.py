"""The command line: verbs only. Each parses, calls the library, and prints."""
