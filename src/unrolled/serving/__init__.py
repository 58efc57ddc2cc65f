"""The server: models whose state is a value that is kept, continued, forked and moved."""
