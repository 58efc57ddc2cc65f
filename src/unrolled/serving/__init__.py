"""The server, for models whose state is a value that can be kept, continued, forked and moved."""
