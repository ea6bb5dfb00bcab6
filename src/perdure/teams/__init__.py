"""Teams: agents that send each other messages, saved together without stopping them."""
