"""Models and weights of other libraries, in and out. Nothing is imported here: import the module you want."""
