"""Tables inside other runtimes."""
