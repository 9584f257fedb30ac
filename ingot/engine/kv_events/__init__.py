"""What is kept, told to routers before several servers."""
