"""Recording and alert rules as Python objects, and the two formats that they are written in."""
