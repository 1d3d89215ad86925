"""`options={"verify": True}`: calls compared with eager, down to the node that differs."""
