"""Where this library meets others. Nothing is imported here: each module needs the library it is for."""
