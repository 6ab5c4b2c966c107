"""What is in flight right now, and how the processes stand: from rings, or from an agent."""
